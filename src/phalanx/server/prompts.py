"""From messages and texts to prompts, within what a context could hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from phalanx.errors import RequestError
from phalanx.server import markup
from phalanx.server.errors import bad_request
from phalanx.server.protocol import CompletionRequest, Message, TemplateOptions, Tool

_PROBED = 8
_SURELY = 2


class Encoder:
    """Text to tokens. No work is done for text that cannot fit: it would cost much, and end in the same refusal."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._context = context
        self._most_characters = max(map(len, tokenizer.get_vocab()), default=1) * context

    def check_size(self, characters: int) -> None:
        """Even if every token were the longest there is."""
        if characters > self._most_characters:
            raise self._too_long(f"{characters} characters")

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Where text is long, its beginning is tried first: if that alone is twice what fits, the rest is not read."""
        self.check_size(len(text))
        probed = _PROBED * self._context
        if len(text) > probed:
            tokens = len(self._tokenizer.encode(text[:probed], add_special_tokens=False))
            if tokens > _SURELY * self._context:
                raise self._too_long(f"far more than {self._context} tokens")
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        if len(tokens) > self._context:
            raise self._too_long(f"{len(tokens)} tokens")
        return self._tokenizer.decode(tokens, skip_special_tokens=not keep_special)

    def _too_long(self, found: str) -> RequestError:
        return RequestError(
            "prompt_too_long",
            f"The text has {found}; the context is {self._context} tokens.",
            "Shorten it, or raise max_model_len.",
        )


class ChatTemplates:
    """A model's chat templates, which came with it and are not trusted: for a process with limits."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens

    def try_out(self) -> None:
        """Every template, in all of its parts that are read before it is run. What it says of a greeting is its own."""
        for name in self._templates:
            try:
                self._render(name, [{"role": "user", "content": "Hello"}], [], {})
            except RequestError:
                continue

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: TemplateOptions | None = None
    ) -> str:
        """The prompt's text, up to where the answer begins."""
        if not self._templates:
            raise RequestError(
                "no_chat_template", "This model's tokenizer has no chat template.", "Use a plain prompt instead."
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        shown = [tool.model_dump(exclude_none=True) for tool in tools]
        switches = options.model_dump(exclude_none=True) if options is not None else {}
        return self._render(name, [_plain(message) for message in messages], shown, switches)

    def _render(
        self, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], switches: dict[str, Any]
    ) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self._templates[name],
                add_generation_prompt=True,
                **self._special_tokens,
                **switches,
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                "bad_conversation",
                f"The model's chat template refuses this conversation: {str(error)[:400]}.",
                "Templates usually want roles to alternate and contents to be text.",
            ) from error
        return str(texts[0])


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request("A tool call's arguments are not the JSON text of an object.", param="messages")
    return arguments


def characters_of(messages: Sequence[Message]) -> int:
    """Of the texts in messages: what is surely part of the prompt."""
    contents = (message.content or "" for message in messages)
    return sum(len(text) if isinstance(text, str) else sum(len(part.text) for part in text) for text in contents)


def thinking_in(prompt: str) -> bool | None:
    """Whether the template has opened a thought for the model to continue, closed one, or neither."""
    end = prompt.rstrip()
    return True if end.endswith(markup.THINK) else False if end.endswith(markup.END_THINK) else None


def prompts_of(request: CompletionRequest, encoder: Encoder) -> list[list[int]]:
    """The token ids of each prompt."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [encoder.encode(prompt, special_tokens=True)]
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return [encoder.encode(each, special_tokens=True) if isinstance(each, str) else list(each) for each in prompt]


def echoes_of(request: CompletionRequest, prompts: list[list[int]], encoder: Encoder) -> list[str]:
    """What the answers to each prompt begin with: the prompt where it is echoed, else nothing."""
    if not request.echo:
        return [""] * len(prompts)
    if request.logprobs is not None:
        raise bad_request("echo with logprobs asks for log-probabilities of the prompt, which are not computed.")
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = given if isinstance(given[0], str) else [encoder.decode(prompt) for prompt in prompts]
    return [str(text) for text in texts]
