"""From a request to /v1/responses to the chat it means, and what its answer repeats of it."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter

from phalanx.server import protocol
from phalanx.server.errors import bad_request
from phalanx.server.fields import MAX_MESSAGES
from phalanx.server.prepared import ResponseRecord
from phalanx.server.protocol import (
    ChatRequest,
    Function,
    FunctionCall,
    Message,
    NamedFunction,
    Sampling,
    Tool,
    ToolCall,
)
from phalanx.server.responses.wire import (
    AllowedFunctionTools,
    CallItem,
    ContentPart,
    FunctionTool,
    Item,
    Items,
    MessageItem,
    NamedFunctionTool,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
)

SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
MAX_KEPT_BYTES = 4 * 2**20
"""Of a conversation: what is kept of it comes back with every request that goes on with it."""

_SEAL = "phalanx:"

_read_items = TypeAdapter(Items).validate_json


def items_of(request: ResponsesRequest, earlier: bytes | None) -> list[Item]:
    """The whole conversation: what was kept, and what is new."""
    new = [MessageItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    items = [*(_read_items(earlier) if earlier is not None else []), *new]
    if not items:
        raise bad_request("input has no items.", param="input")
    if len(items) > MAX_MESSAGES:
        raise bad_request(f"The conversation has {len(items)} items; {MAX_MESSAGES} are allowed.", param="input")
    return items


def to_chat(request: ResponsesRequest, items: list[Item]) -> ChatRequest:
    if request.background:
        raise bad_request("background is not accepted. Answers are made while their client waits.", param="background")
    if request.tools and not request.functions:
        raise bad_request(f"tools.0.type: {request.tools[0].type} is not served here alone.", param="tools")
    instructions = [Message(role="system", content=request.instructions)] if request.instructions else []
    logprobs = LOGPROBS in (request.include or [])
    return ChatRequest(
        **{name: getattr(request, name) for name in Sampling.model_fields},
        model=request.model,
        messages=[*instructions, *_messages(items)],
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        stream=request.stream,
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs if logprobs else None,
        tools=[_tool(tool) for tool in request.functions],
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_form(request.text.format) if request.text else None,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def record_of(request: ResponsesRequest, items: list[Item], model: str) -> ResponseRecord:
    include, store = request.include or [], request.store is not False
    reasoning = request.reasoning.model_dump() if request.reasoning else {"effort": None}
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {"format": {"type": "text"}}
    echo: dict[str, Any] = {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"summary": None} | reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": text,
        "tool_choice": _dumped(request.tool_choice or "auto"),
        "tools": [{"strict": None, "description": None} | tool.model_dump() for tool in request.functions],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
    return ResponseRecord(
        echo=msgspec.json.encode(echo),
        items=_kept(items) if store else b"[]",
        store=store,
        logprobs=LOGPROBS in include,
        sealed_reasoning=SEALED_REASONING in include,
    )


def _kept(items: list[Item]) -> bytes:
    found = msgspec.json.encode([item.model_dump(exclude_none=True) for item in items])
    if len(found) > MAX_KEPT_BYTES:
        raise bad_request(
            f"The conversation has {len(found)} bytes; {MAX_KEPT_BYTES} are kept. Leave out what the model does not "
            "read, or set store to false.",
            "conversation_too_large",
            param="input",
        )
    return found


def _dumped(choice: str | NamedFunctionTool | AllowedFunctionTools) -> object:
    return choice if isinstance(choice, str) else choice.model_dump()


def _messages(items: list[Item]) -> list[Message]:
    """What a model thought, said and called in a row is one message of its own."""
    messages: list[Message] = []
    turn: dict[str, Any] = {}

    def end_turn() -> None:
        if turn:
            messages.append(Message(role="assistant", **turn))
            turn.clear()

    for item in items:
        if isinstance(item, ReasoningItem):
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), _thought(item))))
        elif isinstance(item, CallItem):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if "content" in turn:
                end_turn()
            turn["content"] = _text(item.content)
        else:
            end_turn()
            messages.append(_other(item))
    end_turn()
    return messages


def _other(item: MessageItem | ResultItem) -> Message:
    if isinstance(item, ResultItem):
        return Message(role="tool", content=_text(item.output), tool_call_id=item.call_id)
    return Message(role=item.role, content=_text(item.content))


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _thought(item: ReasoningItem) -> str:
    """As text, or sealed by `sealed`; one that another server has sealed cannot be read here."""
    if item.content:
        return _text(item.content)
    if item.encrypted_content is not None and item.encrypted_content.startswith(_SEAL):
        try:
            return base64.b64decode(item.encrypted_content.removeprefix(_SEAL), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise bad_request("The encrypted_content of a reasoning item is damaged.", param="input") from None
    return _text(item.summary)


def sealed(thought: str) -> str:
    """For clients that keep nothing but this of a thought. It is no secret from them."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def _tool(tool: FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters or {})
    return Tool(type="function", function=function)


def _choice(
    request: ResponsesRequest,
) -> Literal["none", "auto", "required"] | protocol.NamedTool | protocol.SomeTools | None:
    choice = request.tool_choice
    if isinstance(choice, NamedFunctionTool):
        return _named(choice)
    if isinstance(choice, AllowedFunctionTools):
        allowed = protocol.AllowedTools(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        return protocol.SomeTools(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: NamedFunctionTool) -> protocol.NamedTool:
    return protocol.NamedTool(type="function", function=NamedFunction(name=tool.name))


def _form(form: TextFormat) -> protocol.ResponseFormat:
    if form.type != "json_schema":
        return protocol.ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise bad_request("text.format of type json_schema needs a schema.", param="text")
    return protocol.ResponseFormat(type="json_schema", json_schema=protocol.JsonSchema(schema_=form.schema_))
