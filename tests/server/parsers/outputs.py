"""Model outputs with their meaning written by hand, and the parser run over them in every kind of pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from phalanx.server.parsers import Delta, OutputParser, ToolSchema

WEATHER = ToolSchema("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}})


@dataclass(frozen=True)
class Output:
    """A model's text and what it means; a call is (name, arguments as JSON text)."""

    title: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    reasoner: str | None = None
    thinking: bool | None = None
    broken: int | None = None
    """The call whose arguments are no JSON, as the model wrote them."""

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Meaning:
    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def parse(pieces: Iterable[str], tools: str | None, **options: object) -> Meaning:
    """What the deltas of these pieces add up to, the protocol checked on the way."""
    deltas = deltas_of(pieces, tools, **options)
    check_protocol(deltas)
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    for call in itertools.chain.from_iterable(delta.tool_calls for delta in deltas):
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
        names[call.index] = call.name or names[call.index]
    return Meaning(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple((names[index], arguments[index]) for index in arguments),
    )


def deltas_of(
    pieces: Iterable[str],
    tools: str | None,
    schemas: Sequence[ToolSchema] = (WEATHER,),
    reasoner: str | None = None,
    thinking: bool | None = None,
) -> list[Delta]:
    ids = (f"call_{number}" for number in itertools.count())
    parser = OutputParser(reasoner, tools, schemas, thinking, new_id=lambda: next(ids))
    return [*(parser.feed(piece) for piece in pieces), parser.finish()]


def check_protocol(deltas: Sequence[Delta]) -> None:
    """Calls come in order, `id` and `name` first and once, and no reasoning follows an answer."""
    num_calls = 0
    answered = False
    for delta in deltas:
        assert bool(delta) == bool(delta.content or delta.reasoning or delta.tool_calls)
        assert not (answered and delta.reasoning)
        answered = answered or bool(delta.content or delta.tool_calls)
        for call in delta.tool_calls:
            if call.name is not None:
                assert (call.index, call.id) == (num_calls, f"call_{num_calls}")
                num_calls += 1
            else:
                assert call.arguments, "a delta that says nothing"
                assert (call.index, call.id) == (num_calls - 1, None)


def check(output: Output, tools: str | None, schemas: Sequence[ToolSchema] = (WEATHER,)) -> None:
    """The text means what was written down: whole, cut in two at every place, and character by character."""
    expected = Meaning(output.reasoning, output.content, output.calls)
    text = output.text
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in cuts:
        found = parse(pieces, tools, schemas=schemas, reasoner=output.reasoner, thinking=output.thinking)
        assert found == expected, f"in pieces {pieces}"
    for index, (_, arguments) in enumerate(output.calls):
        assert is_object(arguments) == (index != output.broken)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """The text, cut anywhere, empty pieces among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
