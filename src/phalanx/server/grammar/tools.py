"""Calls that a model must make, in the format it was taught."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import RequestError
from phalanx.server import markup
from phalanx.server.grammar.constraint import Constraint, TagFormat, sequence, sequence_or

TOOL_FORMATS = ("hermes", "qwen3_xml", "llama3_json", "llama4_pythonic", "deepseek_v31")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

OfferedTool = Mapping[str, Any]


def tools_constraint(
    tools: Sequence[OfferedTool],
    choice: str,
    tool_format: str,
    parallel: bool = True,
    or_form: Constraint | None = None,
) -> Constraint:
    """An answer that calls tools and says nothing else: one or more if `choice` is 'required', else the one it names.

    A tool is {"name": ..., "parameters": JSON schema}. What cannot be enforced of its schema is taken as a hint. Not
    `parallel` means one call alone. With `or_form` an answer of that form, which has no calls, is as good.
    """
    chosen = [tool for tool in tools if choice in ("required", tool["name"])]
    if not chosen:
        raise RequestError("unknown_tool", f"No tool is called {choice!r:.100}.", "Choose one of the tools given.")
    for tool in chosen:
        if not isinstance(tool["name"], str) or not _NAME.fullmatch(tool["name"]):
            raise RequestError(
                "bad_tool", f"A tool is called {tool['name']!r:.100}.", "Use letters, digits, '_', '.' and '-'."
            )
    calls = _calls(chosen, tool_format, only_one=choice != "required" or not parallel)
    return sequence(calls, tolerant=True) if or_form is None else sequence_or(calls, or_form)


def _calls(tools: Sequence[OfferedTool], tool_format: str, only_one: bool) -> list[TagFormat]:
    if tool_format == "hermes":
        begin, end = markup.CALL + '\n{"name": "%s", "arguments": ', "}\n" + markup.END_CALL
        return [_tags(tools, begin, end, "\n", only_one, {"excludes": [markup.END_CALL]})]
    if tool_format == "qwen3_xml":
        begin, end = f"{markup.CALL}\n{markup.FUNCTION}%s>\n", f"{markup.END_FUNCTION}\n{markup.END_CALL}"
        options = {"excludes": [markup.END_PARAMETER], "style": "qwen_xml"}
        return [_tags(tools, begin, end, "\n", only_one, options)]
    if tool_format == "llama3_json":
        return [_tags(tools, '{"name": "%s", "parameters": ', "}", "; ", only_one, {})]
    if tool_format == "deepseek_v31":
        begin, end = f"{markup.DEEPSEEK_CALL}%s{markup.DEEPSEEK_SEPARATOR}", markup.DEEPSEEK_END_CALL
        calls = _tags(tools, begin, end, "", only_one, {"excludes": [end]})
        return [_constant(markup.DEEPSEEK_CALLS), calls, _constant(markup.DEEPSEEK_END_CALLS)]
    if tool_format == "llama4_pythonic":
        functions = [{"name": tool["name"], "parameters": _parameters(tool)} for tool in tools]
        return [{"type": "pythonic_calls", "functions": functions, "only_one": only_one}]
    raise RequestError(
        "unknown_tool_format",
        f"There is no tool format {tool_format!r:.100}.",
        f"Use one of {', '.join(TOOL_FORMATS)}.",
    )


def _tags(
    tools: Sequence[OfferedTool], begin: str, end: str, separator: str, only_one: bool, options: TagFormat
) -> TagFormat:
    """Calls that stand between a beginning, with the tool's name in it, and an end."""
    tags = [
        {
            "type": "tag",
            "begin": begin % tool["name"],
            "content": {"type": "json_schema", "json_schema": _parameters(tool), "tolerant": True} | options,
            "end": end,
        }
        for tool in tools
    ]
    calls: TagFormat = {"type": "tags_with_separator", "tags": tags, "separator": separator}
    return calls | {"at_least_one": True, "stop_after_first": only_one}


def _constant(text: str) -> TagFormat:
    return {"type": "const_string", "value": text}


def _parameters(tool: OfferedTool) -> dict[str, Any]:
    """Its schema, which describes an object whatever else it says."""
    parameters = tool.get("parameters")
    return {**parameters, "type": "object"} if isinstance(parameters, dict) else {"type": "object"}
