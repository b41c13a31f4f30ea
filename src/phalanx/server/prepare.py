"""Where requests are read: a process that checks a body, renders its chat and tokenises it, so that none of it can
hold up the server. Run as a module, it does so in processes that can be spared."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError
from tokenizers import Tokenizer

from phalanx.engine.core import check_request
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import PhalanxError, RequestError
from phalanx.server import forked
from phalanx.server.anthropic.translate import to_chat
from phalanx.server.anthropic.wire import CountRequest, MessagesRequest
from phalanx.server.complaints import complaint_of, problem_of
from phalanx.server.errors import ApiError, bad_request, model_not_found
from phalanx.server.fields import MAX_TOKENS, MAX_TOOLS, MAX_UNKNOWN_FIELDS, Body
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.request import constraint_of
from phalanx.server.offer import Offer, offer_of
from phalanx.server.parsers import ToolSchema
from phalanx.server.prepared import (
    LANES,
    QUICK,
    Asked,
    Assignment,
    Continues,
    DetokenizedText,
    EmbeddingForm,
    Prepared,
    Problem,
    ReaderReady,
    ReadRequest,
    ResponseRecord,
    TokenizedText,
    decode_asked,
    decode_assignment,
    encode,
)
from phalanx.server.prompts import Encoder, characters_of, check_told, echoes_of, inputs_of, prompts_of, token_rules
from phalanx.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Constrained,
    DetokenizeRequest,
    EmbeddingsRequest,
    Message,
    Rendering,
    TokenizeRequest,
    Tool,
)
from phalanx.server.refused import check_fields
from phalanx.server.responses.translate import items_of, record_of
from phalanx.server.responses.translate import to_chat as response_to_chat
from phalanx.server.responses.wire import ResponsesRequest
from phalanx.server.templates import ChatTemplates, thinking_in

B = TypeVar("B", bound=Body)


class RequestReader:
    """Reads requests for one model."""

    def __init__(self, assignment: Assignment) -> None:
        self._names = assignment.names
        self._vocab = assignment.vocab
        self._context = assignment.context
        self._tool_parser = assignment.tool_parser
        self._adapters: list[str] = []
        self._pooling = assignment.pooling
        self._hidden = assignment.hidden
        self._encoder = Encoder(Tokenizer.from_str(assignment.tokenizer), assignment.context)
        self.templates = ChatTemplates(assignment.templates, assignment.special_tokens, assignment.tools_in_words)
        self.bad_template: str | None = None

    def outcome(self, asked: Asked) -> ReadRequest:
        """What a request comes to, or what is wrong with it."""
        self._adapters = asked.adapters
        readers: dict[str, Callable[[bytes], ReadRequest]] = {
            "chat": lambda body: self._answer(*self._read(ChatRequest, body)),
            "completion": self._completion,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "message": lambda body: self._answer(*self._message(MessagesRequest, body)),
            "message_tokens": self._message_tokens,
            "response": lambda body: self._response(body, asked.earlier),
            "embedding": self._embedding,
        }
        try:
            return readers[asked.kind](asked.body)
        except PhalanxError as error:
            return problem_of(ApiError.of(error))
        except ApiError as error:
            return problem_of(error)
        except MemoryError:
            return Problem(400, "The request takes more memory to read than there is for one.", "request_too_complex")
        except Exception:
            told = "The server made a mistake; its log has the details."
            return Problem(500, told, "internal_error", trace=traceback.format_exc(limit=-8))

    def _answer(self, request: ChatRequest, unknown: list[str], record: ResponseRecord | None = None) -> Prepared:
        """What a chat comes to, by whatever API it came."""
        offer = self._offer(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", param="top_logprobs")
        params = request.to_params(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=request.top_logprobs or 0 if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        constraint = constraint_of(request, offer, self._tool_parser)
        text, heeded = self._text(request.messages, offer.tools, request, request.reasoning_effort)
        return self._prepared(
            request,
            [self._encoder.encode(text, special_tokens=False)],
            params,
            constraint,
            unknown=unknown if heeded else [*unknown, "reasoning_effort"],
            tools=[ToolSchema(tool.function.name, tool.function.parameters) for tool in offer.tools],
            most_calls=1 if offer.one else MAX_TOOLS,
            thinking=thinking_in(text),
            echoes=[""],
            record=record,
        )

    def _prepared(
        self,
        request: Constrained,
        prompts: list[list[int]],
        params: SamplingParams,
        constraint: Constraint | None,
        **more: Any,
    ) -> Prepared:
        """What chats and plain prompts have in common."""
        options = request.stream_options
        if options is not None and not request.stream:
            raise bad_request("stream_options are for streams: set stream to true.", param="stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not told in streams.", param="prompt_logprobs")
        prompts = [self._truncated(prompt, request, params) for prompt in prompts]
        self._check(prompts, params)
        check_told(prompts, params)
        return Prepared(
            model=request.model or self._names[0],
            prompts=prompts,
            params=params,
            stream=bool(request.stream),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
            salt=request.cache_salt,
            constraint=constraint,
            rules=token_rules(request, self._encoder, self._vocab),
            keep_special=not request.skip_special_tokens,
            keep_stop=request.include_stop_str_in_output,
            tell_tokens=bool(request.return_token_ids),
            prompt_logprobs=request.prompt_logprobs,
            **more,
        )

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Each alone, and all together: the server has to take them in at once."""
        for prompt in prompts:
            check_request(prompt, params, self._vocab, self._context)
        total = sum(map(len, prompts))
        if total > MAX_TOKENS:
            raise bad_request(f"The prompts have {total} tokens in all; {MAX_TOKENS} are taken at once.")

    def _truncated(
        self, prompt: list[int], request: Constrained | EmbeddingsRequest, params: SamplingParams
    ) -> list[int]:
        most = request.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == 0:
            raise bad_request("truncate_prompt_tokens leaves no prompt.", param="truncate_prompt_tokens")
        answer = 1 if params.max_tokens is None else params.max_tokens
        return prompt[-(most if most > 0 else max(1, self._context - answer)) :]

    def _text(
        self, messages: list[Message], tools: list[Tool], how: Rendering, effort: str | None = None
    ) -> tuple[str, bool]:
        """The prompt of a chat, and whether its wish for an effort, if it has one, is part of it."""
        self._check_template()
        self._encoder.check_size(characters_of(messages))
        switches, heeded = self.templates.switches(how.chat_template_kwargs or {}, effort)
        return self.templates.render(messages, tools, how, switches), heeded or effort is None

    def _completion(self, body: bytes) -> Prepared:
        request, unknown = self._read(CompletionRequest, body)
        prompts = prompts_of(request, self._encoder)
        echo_logprobs = bool(request.echo) and request.logprobs is not None
        of_prompt = [request.prompt_logprobs, request.logprobs if echo_logprobs else None]
        return self._prepared(
            request,
            prompts,
            request.to_params(
                request.max_tokens,
                request.logprobs,
                max((most for most in of_prompt if most is not None), default=None),
            ),
            constraint_of(request, Offer([], False, False), None),
            unknown=unknown,
            echoes=echoes_of(request, prompts, self._encoder),
            echo_logprobs=echo_logprobs,
        )

    def _embedding(self, body: bytes) -> Prepared:
        request, unknown = self._read(EmbeddingsRequest, body)
        if self._pooling.kind is None:
            raise bad_request(f"This model's own pooling, {self._pooling.found}, is not known: use --pooling.")
        if request.dimensions not in (None, self._hidden):
            raise bad_request(
                f"dimensions is {request.dimensions}. Embeddings of this model have {self._hidden} numbers, which mean "
                "nothing if some are left out.",
                param="dimensions",
            )
        params = SamplingParams(max_tokens=0, pooling=self._pooling.kind, priority=request.priority)
        inputs = inputs_of(request, self._encoder, self._hidden)
        prompts = [self._truncated(prompt, request, params) for prompt in inputs]
        self._check(prompts, params)
        return Prepared(
            model=request.model or self._names[0],
            prompts=prompts,
            params=params,
            stream=False,
            include_usage=False,
            salt=request.cache_salt,
            constraint=None,
            unknown=unknown,
            embedding=EmbeddingForm(
                request.encoding_format == "base64",
                self._pooling.normalised if request.normalize is None else request.normalize,
            ),
        )

    def _message(self, kind: type[CountRequest], body: bytes) -> tuple[ChatRequest, list[str]]:
        request, unknown = self._read(kind, body)
        return to_chat(request), unknown

    def _response(self, body: bytes, earlier: bytes | None) -> Prepared | Continues:
        request, unknown = self._read(ResponsesRequest, body)
        if request.previous_response_id is not None and earlier is None:
            return Continues(request.previous_response_id)
        items = items_of(request, earlier)
        record = record_of(request, items, request.model or self._names[0])
        return self._answer(response_to_chat(request, items), unknown, record)

    def _message_tokens(self, body: bytes) -> TokenizedText:
        request, _ = self._message(CountRequest, body)
        text, _ = self._text(request.messages, self._offer(request).tools, request, request.reasoning_effort)
        return TokenizedText(self._encoder.encode(text, special_tokens=False))

    def _tokenize(self, body: bytes) -> TokenizedText:
        request, _ = self._read(TokenizeRequest, body)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Give either prompt or messages.")
        if request.messages is None:
            tokens = self._encoder.encode(request.prompt or "", request.add_special_tokens)
        else:
            text, _ = self._text(request.messages, request.tools or [], request)
            tokens = self._encoder.encode(text, special_tokens=False)
        return TokenizedText(tokens, self._encoder.words(tokens) if request.return_token_strs else None)

    def _detokenize(self, body: bytes) -> DetokenizedText:
        request, _ = self._read(DetokenizeRequest, body)
        if request.tokens:
            check_request(request.tokens, SamplingParams(), self._vocab, len(request.tokens) + 1)
        return DetokenizedText(self._encoder.decode(request.tokens, keep_special=True))

    def _read(self, kind: type[B], body: bytes) -> tuple[B, list[str]]:
        """A request, and the names of its fields that nobody reads."""
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            raise complaint_of(error) from None
        check_fields(request.model_extra or {})
        asked = getattr(request, "model", None)
        if asked is not None and asked not in self._names and asked not in self._adapters:
            raise model_not_found(asked, self._names[0])
        return request, list(islice(request.unknown_fields(), MAX_UNKNOWN_FIELDS))

    def _check_template(self) -> None:
        if self.bad_template is not None:
            raise RequestError(
                "bad_chat_template",
                f"This model's chat template cannot be used: {self.bad_template}.",
                "Use a plain prompt, or give the model another template.",
            )

    def _offer(self, request: ChatRequest) -> Offer:
        offer = offer_of(request)
        if offer.tools and self._tool_parser is None:
            raise bad_request(
                "Calls of tools are turned off: start the server without --tool-call-parser none.", param="tools"
            )
        return offer


def main() -> None:
    """Templates are tried out in a process of their own; once they have passed, this one compiles them for all.

    It needs a bound of its own for that: where memory runs out, Jinja leaves a constant to be worked out later.
    """
    sockets, message = forked.read_start()
    reader = RequestReader(decode_assignment(message))
    forked.limit_memory(LANES[QUICK].memory_bytes)
    if forked.survives(reader.templates.try_out, LANES[QUICK]):
        reader.templates.try_out()
    else:
        reader.bad_template = "it breaks off, or takes too much time or memory"
    forked.say_ready(encode(ReaderReady(reader.bad_template)))
    forked.serve(sockets, LANES, lambda body: encode(reader.outcome(decode_asked(body))))


if __name__ == "__main__":
    main()
