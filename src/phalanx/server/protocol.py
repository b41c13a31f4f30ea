"""What clients may ask: the fields of OpenAI's requests, and the engine's own, each with its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from phalanx.engine.sampling import (
    COUNT_LIMIT,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SEED_LIMIT,
    SamplingParams,
)
from phalanx.server.errors import bad_request
from phalanx.server.fields import (
    MAX_BAD_WORDS,
    MAX_INPUTS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TEMPLATE_SWITCHES,
    MAX_TOKENS,
    MAX_TOOLS,
    Bias,
    Body,
    Count,
    Name,
    Number,
    Object,
    StopString,
    Text,
    TokenId,
    Tokens,
    ToolName,
)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Body):
    """How an answer's tokens are chosen and told: what every request for one may say, whatever API it comes by."""

    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=COUNT_LIMIT)
    min_p: Number = Field(0.0, ge=0, le=1)
    repetition_penalty: Number = Field(1.0, gt=0, le=100)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: Bias | None = None
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = Field([])
    min_tokens: int = Field(0, ge=0, le=COUNT_LIMIT)
    ignore_eos: bool = False
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=COUNT_LIMIT, description="-1: to what fits.")
    return_token_ids: bool | None = None
    priority: int = Field(0, ge=-COUNT_LIMIT, le=COUNT_LIMIT, description="Lower numbers are served first.")
    cache_salt: Name | None = Field(None, description="Cached prefixes are shared only with the same salt.")


class Asking(Sampling):
    """The fields that chat and plain completions share."""

    model: Name | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Of the prompt's tokens; no streams.")

    def to_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
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
            prompt_logprobs=prompt_logprobs,
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
    reasoning: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None


class Function(Body):
    name: ToolName
    description: Text | None = None
    parameters: Object = Field({})
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class SomeTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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


Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]


class StructuredOutputs(Body):
    """Exactly one of these."""

    json_: Object | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Text | None = None


class Constrained(Asking):
    """The form of an answer, under the names that OpenAI, vLLM (of two generations) and SGLang have for it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None


Switch = bool | int | Number | Annotated[Text, Field(max_length=1024)] | None
"""What may be handed to a chat template, which runs on the server: nothing that it could walk through."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Rendering(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[Name, Switch], Field(max_length=MAX_TEMPLATE_SWITCHES)] | None = None


class ChatRequest(Constrained, Rendering):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None


class CompletionRequest(Constrained):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(16, ge=0, le=COUNT_LIMIT)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


Texts = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
)


class EmbeddingsRequest(Body):
    model: Name | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: Name | None = None
    add_special_tokens: bool = True
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=COUNT_LIMIT, description="-1: to what fits.")
    priority: int = Field(0, ge=-COUNT_LIMIT, le=COUNT_LIMIT, description="Lower numbers are served first.")
    cache_salt: Name | None = None


class TokenizeRequest(Rendering):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
