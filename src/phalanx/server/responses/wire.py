"""What clients of /v1/responses may ask, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phalanx.engine.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS
from phalanx.server.fields import MAX_MESSAGES, MAX_TOOLS, Body, Count, Name, Object, StopString, Text, ToolName
from phalanx.server.protocol import Effort, Rendering, Sampling

ItemStatus = Literal["in_progress", "completed", "incomplete"] | None


class ContentPart(Body):
    """`annotations` and `logprobs` come back with answers, and say nothing to a model."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    id: Name | None = None
    status: ItemStatus = None
    phase: Name | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: ItemStatus = None


class ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Parts
    id: Name | None = None
    status: ItemStatus = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: Parts = Field([])
    content: Parts | None = None
    encrypted_content: Text | None = None
    id: Name | None = None
    status: ItemStatus = None


def _type_of(item: Any) -> str:
    """Messages may leave out their type."""
    found = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(found)[:64] if found is not None else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]
Items = Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionTool(Body):
    """A tool that the client runs. Tools of most other types would run on the server, and are refused by their type."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class LeftOutTool(Body):
    """What agents offer beside their functions, and do without where it is not used. It is named as not read."""

    type: Literal["web_search", "web_search_preview", "namespace"]

    def unknown_fields(self, path: str = "") -> Iterator[str]:
        yield f"{path}{self.type}"


def _kind_of(tool: Any) -> str:
    found = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "left out" if found in ("web_search", "web_search_preview", "namespace") else "function"


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[LeftOutTool, Tag("left out")], Discriminator(_kind_of)
]


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: Name


class AllowedFunctionTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat = TextFormat(type="text")


class Reasoning(Body):
    effort: Effort | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False


class ResponsesRequest(Sampling, Rendering):
    model: Name | None = None
    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    include: Annotated[list[Name], Field(max_length=32, fail_fast=True)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    max_tool_calls: Count | None = None
    metadata: Annotated[dict[Name, Annotated[Text, Field(max_length=512)]], Field(max_length=16)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Name | None = None

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or [] if isinstance(tool, FunctionTool)]
