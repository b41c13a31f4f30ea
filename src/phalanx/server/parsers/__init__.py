"""What a model's text means: reasoning, content and tool calls, streaming and not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from phalanx.errors import ConfigError
from phalanx.server.markup import END_THINK
from phalanx.server.parsers.deepseek_v31 import DeepSeekV31
from phalanx.server.parsers.delta import Delta, ToolCallDelta, ToolSchema, Writer, new_call_id
from phalanx.server.parsers.hermes import Hermes
from phalanx.server.parsers.llama3_json import Llama3Json
from phalanx.server.parsers.llama4_pythonic import Llama4Pythonic
from phalanx.server.parsers.qwen3_xml import Qwen3Xml
from phalanx.server.parsers.state_machine import ToolParser
from phalanx.server.parsers.think import DeepSeekR1, Qwen3, ThinkParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Delta",
    "OutputParser",
    "ToolCallDelta",
    "ToolSchema",
]

REASONING_PARSERS: Mapping[str, type[ThinkParser]] = {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3}

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "deepseek_v31": DeepSeekV31,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_pythonic": Llama4Pythonic,
    "qwen3_coder": Qwen3Xml,
    "qwen3_xml": Qwen3Xml,
}


class OutputParser:
    """What a model's text means: reasoning, content and tool calls, in whatever pieces it comes.

    However the text is cut, the deltas add up to the same. Without a reasoning parser there is no reasoning; without a
    tool parser, or without tools in the request, there are no calls. `thinking` says where the output starts: True in a
    thought that the prompt has opened, False after it, None where the parser's models usually start.
    """

    def __init__(
        self,
        reasoning: str | None,
        tools: str | None,
        tool_schemas: Sequence[ToolSchema] = (),
        thinking: bool | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        think_parser = _named(REASONING_PARSERS, reasoning, "reasoning")
        tool_parser = _named(TOOL_PARSERS, tools, "tool")
        if not tool_schemas:
            tool_parser = None
        self.needs_special_tokens = any(parser.special_tags for parser in (think_parser, tool_parser) if parser)
        self._writer = Writer(END_THINK if think_parser else None, new_id)
        self._tools = tool_parser(self._writer, tool_schemas) if tool_parser else None
        self._feed = self._tools.feed if self._tools else self._writer.say
        self._thought: ThinkParser | None = None
        if think_parser:
            call_tag = tool_parser.opening if tool_parser else None
            self._thought = think_parser(self._writer, self._feed, call_tag, thinking)
            self._feed = self._thought.feed

    @property
    def in_reasoning(self) -> bool:
        """Whether the next piece of text continues a thought."""
        return self._thought is not None and self._thought.in_thought

    def feed(self, text: str) -> Delta:
        """What the next piece of text adds."""
        self._feed(text)
        return self._writer.take()

    def finish(self, cut: bool = False) -> Delta:
        """The text is over: what was held back. Of a text that was cut off, what may be half a tag stays back."""
        for parser in (self._thought, self._tools):
            if parser and not cut:
                parser.finish()
        self._writer.finish(cut)
        return self._writer.take()


_Parser = TypeVar("_Parser")


def _named(parsers: Mapping[str, type[_Parser]], name: str | None, kind: str) -> type[_Parser] | None:
    if name is None or name in parsers:
        return parsers[name] if name else None
    raise ConfigError(
        "unknown_parser", f"There is no {kind} parser {name!r}.", f"Choose one of {', '.join(sorted(parsers))}."
    )
