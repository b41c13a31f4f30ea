"""From a request to /v1/messages to the chat it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from phalanx.server.anthropic.wire import (
    ClientTool,
    CountRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from phalanx.server.errors import bad_request
from phalanx.server.protocol import (
    ChatRequest,
    Effort,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
)


def to_chat(request: CountRequest) -> ChatRequest:
    messages = [*_system(request), *(message for turn in request.messages for message in _messages(turn))]
    if not messages:
        raise bad_request("The messages have no content.", param="messages")
    choice = request.tool_choice or ToolChoice(type="auto")
    form = request.output_config.format if request.output_config else None
    schema = JsonSchema(schema_=form.schema_) if form else None
    return ChatRequest(
        **{name: getattr(request, name) for name in Sampling.model_fields},
        model=request.model,
        messages=messages,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        tools=[_tool(tool) for tool in request.tools or []],
        tool_choice=_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=ResponseFormat(type="json_schema", json_schema=schema) if schema else None,
        reasoning_effort=_effort(request),
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=request.continue_final_message or _is_begun(messages[-1]),
    )


def _is_begun(last: Message) -> bool:
    """An answer whose beginning was given is continued."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _system(request: CountRequest) -> Iterator[Message]:
    if request.system:
        yield Message(role="system", content=_text(request.system))


def _messages(turn: Turn) -> Iterator[Message]:
    """Results of tools are messages of their own, before what the user says beside them."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    if turn.role == "assistant":
        thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
        calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
        if texts or thoughts or calls:
            yield Message(
                role="assistant",
                content="".join(texts),
                reasoning_content="\n".join(thoughts) if thoughts else None,
                tool_calls=calls or None,
            )
        return
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            failed = "Error: " if block.is_error else ""
            yield Message(role="tool", content=failed + _text(block.content or ""), tool_call_id=block.tool_use_id)
    if texts:
        yield Message(role=turn.role, content="\n".join(texts))


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def _tool(tool: ClientTool) -> Tool:
    return Tool(
        type="function",
        function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema),
    )


def _choice(choice: ToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice of type tool needs a name.", param="tool_choice")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _effort(request: CountRequest) -> Effort | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    if request.output_config is not None and request.output_config.effort is not None:
        return request.output_config.effort
    return "medium" if request.thinking is not None else None
