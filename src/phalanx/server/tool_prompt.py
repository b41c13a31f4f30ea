"""Tools for models whose chat template knows none: told in words, in the format that most models have seen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.server.markup import CALL, END_CALL

PARSER = "hermes"
"""What reads the calls that these words ask for."""

Plain = dict[str, Any]

_WORDS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def templates_know_tools(templates: Mapping[str, str]) -> bool:
    """Whether a model's own templates would show tools to it."""
    return any(re.search(r"\btools\b", text) for text in templates.values())


def in_words(messages: Sequence[Plain], tools: Sequence[Plain]) -> list[Plain]:
    """A conversation in which tools, calls and results are plain text."""
    told: list[Plain] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "results": True})
        elif "tool_calls" in message:
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append(rest | {"content": "\n".join([message["content"], *calls]).strip()})
        else:
            told.append(dict(message))
    if tools:
        signatures = _WORDS % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        if told and told[0]["role"] == "system":
            told[0] = {"role": "system", "content": f"{told[0]['content']}\n\n{signatures}"}
        else:
            told.insert(0, {"role": "system", "content": signatures})
    return told


def _call(function: Plain) -> str:
    named = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL}\n{json.dumps(named, ensure_ascii=False)}\n{END_CALL}"
