"""What clients of /v1/messages may ask, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.engine.sampling import MAX_STOP_STRINGS
from phalanx.server.fields import MAX_MESSAGES, MAX_TOOLS, Body, Count, Name, Object, StopString, Text, ToolName
from phalanx.server.protocol import Rendering, Sampling

CacheControl = dict[str, Any] | None
"""Where a client wants prefixes to be cached. They all are."""


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedBlock(Body):
    """A thought that another server has sealed: nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Object
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ClientTool(Body):
    """A tool that the client runs. Tools of other types would run on the server, and are refused by their type."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: Object
    strict: bool | None = None
    cache_control: CacheControl = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether to think first. How long is up to the model: a budget is a hint, and taken as none."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Sampling, Rendering):
    """What the tokens of a prompt depend on."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Name | None = None


class MessagesRequest(CountRequest):
    max_tokens: Count
