"""Offer: which tools a request lets the model call, and whether it must."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.server.errors import bad_request
from phalanx.server.protocol import ChatRequest, NamedTool, SomeTools, Tool


@dataclass(frozen=True)
class Offer:
    """`must` is whether one has to be called, `one` whether no more than one may be."""

    tools: list[Tool]
    must: bool
    one: bool


def offer_of(request: ChatRequest) -> Offer:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to. Tools that may not be called are not shown."""
    choice, tools = request.tool_choice, request.tools or []
    one = request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        return Offer(_named(tools, [choice]), must=True, one=True)
    if isinstance(choice, SomeTools):
        return Offer(_named(tools, choice.allowed_tools.tools), choice.allowed_tools.mode == "required", one)
    if choice == "none":
        return Offer([], must=False, one=one)
    if choice == "required" and not tools:
        raise bad_request("tool_choice asks for a call, but tools is empty.", param="tool_choice")
    return Offer(tools, must=choice == "required", one=one)


def _named(tools: list[Tool], wanted: list[NamedTool]) -> list[Tool]:
    by_name = {tool.function.name: tool for tool in tools}
    for name in (each.function.name for each in wanted):
        if name not in by_name:
            raise bad_request(f"tool_choice names {name[:64]!r}, which is not in tools.", param="tool_choice")
    return [by_name[each.function.name] for each in wanted]
