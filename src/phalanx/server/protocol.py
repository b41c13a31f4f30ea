"""What clients may ask: the fields of OpenAI's requests, and the engine's own, each with its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from phalanx.engine.sampling import (
    COUNT_LIMIT,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SEED_LIMIT,
    SamplingParams,
)
from phalanx.server.errors import bad_request

MAX_MESSAGES = 2048
MAX_PROMPTS = 128
MAX_TOOLS = 128
MAX_STOP_LENGTH = 1024


def _clean(text: str) -> str:
    """Text that every part of the way can carry."""
    if "\x00" in text:
        raise ValueError("it holds a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it holds half a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(_clean)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_clean)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_clean)]
TokenId = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
Count = Annotated[int, Field(ge=1, le=COUNT_LIMIT)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Types are taken as they are written: no number in quotes, no 1 for true. Unknown fields are kept to be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unknown_fields(self, path: str = "") -> Iterator[str]:
        """Names of fields nobody reads, as `messages.0.colour`."""
        for name in self.model_extra or {}:
            yield path + name
        for name in self.model_fields_set:
            value = getattr(self, name, None)
            for index, item in enumerate(value) if isinstance(value, list) else [("", value)]:
                if isinstance(item, Body):
                    yield from item.unknown_fields(f"{path}{name}.{index}.".replace("..", "."))


class StreamOptions(Body):
    include_usage: bool = False


class Sampling(Body):
    """The fields that chat and plain completions share."""

    model: Name | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=COUNT_LIMIT)
    min_p: Number = Field(0.0, ge=0, le=1)
    repetition_penalty: Number = Field(1.0, gt=0, le=100)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS
    )
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    min_tokens: int = Field(0, ge=0, le=COUNT_LIMIT)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    cache_salt: Name | None = Field(None, description="Cached prefixes are shared only with the same salt.")

    def to_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_token_keys(self.logit_bias or {}),
            seed=self.seed,
            logprobs=logprobs,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias has the key {key[:40]!r}, which is no token id.", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


class TextPart(Body):
    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    name: Name
    arguments: Text


class ToolCall(Body):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")
    description: Text | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    name: Name | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """Exactly one of these."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = None
    structural_tag: Text | None = None


class Constrained(Sampling):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class TemplateOptions(Body):
    """Chat templates run on the server: only switches that are known to be harmless pass."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(Constrained):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(Constrained):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class TokenizeRequest(Body):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: list[TokenId] = Field(max_length=COUNT_LIMIT)
