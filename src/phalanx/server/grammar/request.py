"""From a request's fields to the form its answer must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phalanx.server.errors import bad_request
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.tools import tools_constraint
from phalanx.server.protocol import ChatRequest, Constrained, NamedTool, ResponseFormat, StructuredOutputs


def constraint_of(request: Constrained, tool_parser: str | None) -> Constraint | None:
    """At most one: two descriptions of the same answer could contradict each other."""
    asked = [
        *_of_response_format(request.response_format or ResponseFormat(type="text")),
        *_of_structured_outputs(request.structured_outputs or StructuredOutputs()),
        *(_of_tools(request, tool_parser) if isinstance(request, ChatRequest) else ()),
    ]
    if len(asked) > 1:
        raise bad_request(
            "The form of the answer is described more than once: use one of response_format, the fields of "
            "structured_outputs, and a tool_choice that forces a call."
        )
    may_call = isinstance(request, ChatRequest) and request.tools and request.tool_choice in (None, "auto")
    if asked and may_call:
        raise bad_request(
            "An answer of a given form leaves no room for tool calls: set tool_choice to none, or leave out tools.",
            param="tool_choice",
        )
    return asked[0] if asked else None


def _of_response_format(wanted: ResponseFormat) -> Iterator[Constraint]:
    if wanted.type == "json_object":
        yield Constraint("json_object")
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad_request("response_format of type json_schema needs json_schema.", param="response_format")
        yield Constraint("json_schema", _dumped(wanted.json_schema.schema_))
    elif wanted.type == "structural_tag":
        if wanted.format is None:
            raise bad_request("response_format of type structural_tag needs format.", param="response_format")
        yield Constraint("structural_tag", _dumped({"format": wanted.format}))


def _of_structured_outputs(wanted: StructuredOutputs) -> Iterator[Constraint]:
    if wanted.json_ is not None:
        yield Constraint("json_schema", wanted.json_ if isinstance(wanted.json_, str) else _dumped(wanted.json_))
    if wanted.regex is not None:
        yield Constraint("regex", wanted.regex)
    if wanted.choice is not None:
        yield Constraint("choice", _dumped(wanted.choice))
    if wanted.grammar is not None:
        yield Constraint("grammar", wanted.grammar)
    if wanted.structural_tag is not None:
        yield Constraint("structural_tag", wanted.structural_tag)


def _of_tools(request: ChatRequest, tool_parser: str | None) -> Iterator[Constraint]:
    choice = request.tool_choice
    if choice != "required" and not isinstance(choice, NamedTool):
        return
    assert tool_parser is not None
    tool_format = "qwen3_xml" if tool_parser == "qwen3_coder" else tool_parser
    tools = [{"name": tool.function.name, "parameters": tool.function.parameters} for tool in request.tools or []]
    name = choice if isinstance(choice, str) else choice.function.name
    yield tools_constraint(tools, name, tool_format, parallel=request.parallel_tool_calls is not False)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
