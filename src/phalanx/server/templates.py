"""ChatTemplates: from messages to the text of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from phalanx.errors import RequestError
from phalanx.server import markup
from phalanx.server.errors import bad_request
from phalanx.server.protocol import Message, Rendering, Tool
from phalanx.server.tool_prompt import in_words

_THINKING = ("enable_thinking", "thinking")
"""Switches that clients send to any model."""
_EFFORT = "reasoning_effort"
_TAKEN = {"conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask"}
"""Names that are no switches."""

Switches = dict[str, Any]


class ChatTemplates:
    """A model's chat templates, which came with it and are not trusted: for a process with limits.

    With `tools_in_words`, they are not shown tools: those are told in the conversation.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, Any], tools_in_words: bool = False
    ) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        self._tools_in_words = tools_in_words

    def try_out(self) -> None:
        """Every template, in all of its parts that are read before it is run. What it says of a greeting is its own."""
        for name in self._templates:
            try:
                self._render(name, [{"role": "user", "content": "Hello"}], [], Rendering(), {})
            except RequestError:
                continue

    def switches(self, given: Mapping[str, Any], effort: str | None) -> tuple[Switches, bool]:
        """What a template is told besides the conversation, and whether the wish for effort is part of it."""
        for name in given:
            if name in _TAKEN or name in self._special_tokens or not (name in _THINKING or self._mentions(name)):
                raise bad_request(
                    f"chat_template_kwargs has {name[:64]!r}, for which this model's template has no use.",
                    param="chat_template_kwargs",
                )
        found: Switches = {}
        if effort is not None and self._mentions(_EFFORT):
            found[_EFFORT] = effort
        if effort is not None and (found.keys() or any(map(self._mentions, _THINKING))):
            found |= dict.fromkeys(_THINKING, effort != "none")
        return found | {name: value for name, value in given.items() if value is not None}, bool(found)

    def _mentions(self, name: str) -> bool:
        word = re.compile(rf"\b{re.escape(name)}\b")
        return any(word.search(text) for text in self._templates.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        how: Rendering | None = None,
        switches: Switches | None = None,
    ) -> str:
        """The prompt's text, up to where the answer begins."""
        if not self._templates:
            raise RequestError(
                "no_chat_template", "This model's tokenizer has no chat template.", "Use a plain prompt instead."
            )
        plain = [_plain(message) for message in messages]
        shown = [tool.model_dump(exclude_none=True) for tool in tools]
        if self._tools_in_words:
            plain, shown = in_words(plain, shown), []
        name = "tool_use" if shown and "tool_use" in self._templates else "default"
        return self._render(name, plain, shown, how or Rendering(), switches or {})

    def _render(
        self,
        name: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        how: Rendering,
        switches: Switches,
    ) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self._templates[name],
                add_generation_prompt=how.add_generation_prompt and not how.continue_final_message,
                continue_final_message=how.continue_final_message,
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
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if thought is not None:
        plain["reasoning_content"] = thought
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


def thinking_in(prompt: str) -> bool | None:
    """Whether the template has opened a thought for the model to continue, closed one, or neither."""
    end = prompt.rstrip()
    return True if end.endswith(markup.THINK) else False if end.endswith(markup.END_THINK) else None
