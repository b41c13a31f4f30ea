"""What clients may ask: the fields of OpenAI's requests, and the engine's own, each with its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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
MAX_TOKENS = 2**20
MAX_TOOLS = 128
MAX_STOP_LENGTH = 1024
MAX_UNKNOWN_FIELDS = 256
MAX_OBJECT_PARTS = 16_384


def _clean(text: str) -> str:
    """Text that every part of the way can carry. Half a surrogate pair is no JSON and does not come here."""
    if "\x00" in text:
        raise ValueError("it holds a NUL character")
    return text


def _of_bounded_size(value: Any) -> Any:
    """An object of any form, with so many members and items in all."""
    parts, left = 0, [value]
    while left:
        part = left.pop()
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += len(inner)
        if parts > MAX_OBJECT_PARTS:
            raise ValueError(f"it has more than {MAX_OBJECT_PARTS} members and items")
        left += inner
    return value


def _biases(bias: dict[str, Any]) -> dict[str, Any]:
    for key, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"the bias of {key[:40]!r} is no number from -100 to 100")
    return bias


Text = Annotated[str, AfterValidator(_clean)]
Object = Annotated[dict[str, Any], AfterValidator(_of_bounded_size)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_clean)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_clean)]
TokenId = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
Count = Annotated[int, Field(ge=1, le=COUNT_LIMIT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[dict[str, Any], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_biases)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class Body(BaseModel):
    """Types are taken as they are written: no number in quotes, no 1 for true. Unknown fields are kept to be named.

    Every list and map has a bound, and the first wrong item of a list ends its check.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="after")
    def _few_unknown_fields(self) -> Self:
        if len(self.model_extra or {}) > MAX_UNKNOWN_FIELDS:
            raise ValueError(f"there are more than {MAX_UNKNOWN_FIELDS} unknown fields")
        return self

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
    logit_bias: Bias | None = None
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = []
    min_tokens: int = Field(0, ge=0, le=COUNT_LIMIT)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    priority: int = Field(0, ge=-COUNT_LIMIT, le=COUNT_LIMIT, description="Lower numbers are served first.")
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
            priority=self.priority,
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
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")
    description: Text | None = None
    parameters: Object = {}
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
    schema_: Object | bool = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Object | None = None


class StructuredOutputs(Body):
    """Exactly one of these."""

    json_: Object | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
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
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(Constrained):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class TokenizeRequest(Body):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
