"""Where requests are read: a process that checks a body, renders its chat and tokenises it, so that none of it can
hold up the server. Run as a module, it does so in processes that can be spared."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from pydantic import ValidationError
from tokenizers import Tokenizer

from phalanx.engine.core import check_request
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import PhalanxError, RequestError
from phalanx.server import forked
from phalanx.server.errors import ApiError, bad_request, model_not_found
from phalanx.server.grammar.request import constraint_of
from phalanx.server.parsers import ToolSchema
from phalanx.server.prepared import (
    LANES,
    QUICK,
    Asked,
    Assignment,
    DetokenizedText,
    Prepared,
    Problem,
    ReaderReady,
    ReadRequest,
    TokenizedText,
    decode_asked,
    decode_assignment,
    encode,
)
from phalanx.server.prompts import ChatTemplates, Encoder, characters_of, echoes_of, prompts_of, thinking_in
from phalanx.server.protocol import (
    MAX_TOOLS,
    MAX_UNKNOWN_FIELDS,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REFUSED = {
    "chat_template": "A chat template in a request would run on the server; it uses the model's own.",
    "suffix": "Text after the answer cannot be given; these models only continue a prompt.",
    "best_of": "Use n: all answers are returned.",
}
B = TypeVar("B", bound=Body)


class RequestReader:
    """Reads requests for one model."""

    def __init__(self, assignment: Assignment) -> None:
        self._name = assignment.name
        self._vocab = assignment.vocab
        self._tool_parser = assignment.tool_parser
        self._encoder = Encoder(Tokenizer.from_str(assignment.tokenizer), assignment.context)
        self.templates = ChatTemplates(assignment.templates, assignment.special_tokens)
        self.bad_template: str | None = None

    def outcome(self, asked: Asked) -> ReadRequest:
        """What a request comes to, or what is wrong with it."""
        readers: dict[str, Callable[[bytes], ReadRequest]] = {
            "chat": self._chat,
            "completion": self._completion,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }
        try:
            return readers[asked.kind](asked.body)
        except PhalanxError as error:
            return _problem(ApiError.of(error))
        except ApiError as error:
            return _problem(error)
        except MemoryError:
            return Problem(400, "The request takes more memory to read than there is for one.", "request_too_complex")
        except Exception:
            told = "The server made a mistake; its log has the details."
            return Problem(500, told, "internal_error", trace=traceback.format_exc(limit=-8))

    def _chat(self, body: bytes) -> Prepared:
        request = self._read(ChatRequest, body)
        self._check_tools(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", param="top_logprobs")
        params = request.to_params(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=request.top_logprobs or 0 if request.logprobs else None,
        )
        tools = [] if request.tool_choice == "none" else request.tools or []
        constraint = constraint_of(request, self._tool_parser)
        self._check_template()
        self._encoder.check_size(characters_of(request.messages))
        text = self.templates.render(request.messages, tools, request.chat_template_kwargs)
        return Prepared(
            prompts=[self._encoder.encode(text, special_tokens=False)],
            params=params,
            stream=bool(request.stream),
            include_usage=request.stream_options is not None and request.stream_options.include_usage,
            salt=request.cache_salt,
            constraint=constraint,
            tools=[ToolSchema(tool.function.name, tool.function.parameters) for tool in tools],
            most_calls=1 if request.parallel_tool_calls is False else MAX_TOOLS,
            thinking=thinking_in(text),
            echoes=[""],
            unknown=_unknown(request),
        )

    def _completion(self, body: bytes) -> Prepared:
        request = self._read(CompletionRequest, body)
        params = request.to_params(request.max_tokens, request.logprobs)
        prompts = prompts_of(request, self._encoder)
        return Prepared(
            prompts=prompts,
            params=params,
            stream=bool(request.stream),
            include_usage=request.stream_options is not None and request.stream_options.include_usage,
            salt=request.cache_salt,
            constraint=constraint_of(request, self._tool_parser),
            tools=[],
            most_calls=MAX_TOOLS,
            thinking=None,
            echoes=echoes_of(request, prompts, self._encoder),
            unknown=_unknown(request),
        )

    def _tokenize(self, body: bytes) -> TokenizedText:
        request = self._read(TokenizeRequest, body)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Give either prompt or messages.")
        if request.messages is None:
            return TokenizedText(self._encoder.encode(request.prompt or "", request.add_special_tokens))
        self._check_template()
        self._encoder.check_size(characters_of(request.messages))
        return TokenizedText(self._encoder.encode(self.templates.render(request.messages), special_tokens=False))

    def _detokenize(self, body: bytes) -> DetokenizedText:
        request = self._read(DetokenizeRequest, body)
        if request.tokens:
            check_request(request.tokens, SamplingParams(), self._vocab, len(request.tokens) + 1)
        return DetokenizedText(self._encoder.decode(request.tokens, keep_special=True))

    def _read(self, kind: type[B], body: bytes) -> B:
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            raise _complaint(error) from None
        for field, why in _REFUSED.items():
            if (request.model_extra or {}).get(field) is not None:
                raise bad_request(f"{field} is not accepted. {why}", param=field)
        asked = getattr(request, "model", None)
        if asked is not None and asked != self._name:
            raise model_not_found(asked, self._name)
        return request

    def _check_template(self) -> None:
        if self.bad_template is not None:
            raise RequestError(
                "bad_chat_template",
                f"This model's chat template cannot be used: {self.bad_template}.",
                "Use a plain prompt, or give the model another template.",
            )

    def _check_tools(self, request: ChatRequest) -> None:
        choice = request.tool_choice
        names = [tool.function.name for tool in request.tools or []]
        if not names and choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but tools is empty.", param="tool_choice")
        if names and choice != "none" and self._tool_parser is None:
            raise bad_request(
                "This model has no known format for tool calls: start the server with --tool-call-parser.",
                param="tools",
            )
        if choice is not None and not isinstance(choice, str) and choice.function.name not in names:
            raise bad_request(
                f"tool_choice names {choice.function.name!r}, which is not in tools.", param="tool_choice"
            )


def _problem(error: ApiError) -> Problem:
    told = error.body["error"]
    return Problem(error.status_code, told["message"], told["code"], told["param"])


def _unknown(request: Body) -> list[str]:
    return list(islice(request.unknown_fields(), MAX_UNKNOWN_FIELDS))


def _complaint(error: ValidationError) -> ApiError:
    """The first complaint by name; a union's many complaints are about one field."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not JSON: {first['ctx']['error']}.", "bad_json")
    if first["type"] == "model_type" and not path:
        return bad_request("The body must be a JSON object, sent as 'content-type: application/json'.", "bad_body")
    where = ".".join(path)[:200] or "body"
    return bad_request(f"{where}: {first['msg']}.", "bad_parameter", param=path[0][:64] if path else None)


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
