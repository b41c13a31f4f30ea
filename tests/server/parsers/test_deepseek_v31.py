"""DeepSeek V3.1: a name and its arguments between special tokens."""

# ruff: noqa: RUF001 (the bars are the model's own)

from __future__ import annotations

import pytest

from .outputs import Output, check, deltas_of

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def calls(*texts: str) -> str:
    return CALLS + "".join(f"{CALL}{text}{END_CALL}" for text in texts) + END_CALLS


OUTPUTS = [
    Output("no call", "It is sunny.\n", content="It is sunny.\n"),
    Output(
        "one call",
        calls(f'get_weather{SEP}{{"city": "Paris"}}'),
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    Output(
        "two calls",
        calls(f'a{SEP}{{"n": 1}}', f'b{SEP}{{"n":2}}'),
        calls=(("a", '{"n": 1}'), ("b", '{"n":2}')),
    ),
    Output("empty arguments", calls(f"a{SEP}{{}}"), calls=(("a", "{}"),)),
    Output(
        "words around",
        "One.\n" + calls(f"a{SEP}{{}}") + " Two.",
        content="One.\nTwo.",
        calls=(("a", "{}"),),
    ),
    Output(
        "space everywhere",
        f"{CALLS}\n{CALL} a {SEP}\n{{}}\n{END_CALL}\n{CALL}b{SEP}{{}}{END_CALL}\n{END_CALLS}\n",
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "letters of the world and escapes",
        calls(f'wetter_北京{SEP}{{"città": "\\"Zürich\\" 🏔️ \\\\"}}'),
        calls=(("wetter_北京", '{"città": "\\"Zürich\\" 🏔️ \\\\"}'),),
    ),
    Output(
        "nested values",
        calls(f'a{SEP}{{"x": {{"y": [{{}}, [1]]}}, "t": true}}'),
        calls=(("a", '{"x": {"y": [{}, [1]]}, "t": true}'),),
    ),
    Output(
        "tags and brackets inside strings",
        calls(f'a{SEP}{{"t": "{END_CALL}{END_CALLS}{{ ]}} <"}}'),
        calls=(("a", f'{{"t": "{END_CALL}{END_CALLS}{{ ]}} <"}}'),),
    ),
    Output("no tags around all calls", f"{CALL}a{SEP}{{}}{END_CALL}", calls=(("a", "{}"),)),
    Output("no end tags", f"{CALLS}{CALL}a{SEP}{{}}{CALL}b{SEP}{{}}", calls=(("a", "{}"), ("b", "{}"))),
    Output("two groups", calls(f"a{SEP}{{}}") + calls(f"b{SEP}{{}}"), calls=(("a", "{}"), ("b", "{}"))),
    Output("one end too many", calls(f"a{SEP}{{}}") + END_CALLS, content=END_CALLS, calls=(("a", "{}"),)),
    Output(
        "one bracket too many",
        calls(f'a{SEP}{{"n": 1}}}}') + "Done.",
        content="}Done.",
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "a bracket is missing",
        calls(f'a{SEP}{{"n": 1', f"b{SEP}{{}}") + "Done.",
        content="Done.",
        calls=(("a", '{"n": 1'), ("b", "{}")),
        broken=0,
    ),
    Output(
        "cut off in the arguments",
        f'{CALLS}{CALL}a{SEP}{{"city": "Pa',
        calls=(("a", '{"city": "Pa'),),
        broken=0,
    ),
    Output(
        "cut off in the second name",
        f"{CALLS}{CALL}a{SEP}{{}}{END_CALL}{CALL}get_w",
        content=f"{CALL}get_w",
        calls=(("a", "{}"),),
    ),
    Output(
        "a call without arguments between two",
        calls(f"a{SEP}{{}}", "b", f"c{SEP}{{}}"),
        content=f"{CALL}b{END_CALL}",
        calls=(("a", "{}"), ("c", "{}")),
    ),
]

NO_CALLS = [
    "if a < b { return <｜> }",
    "see <｜tool▁calls",
    CALLS,
    f"{CALLS}\n",
    f"{CALLS}oops{END_CALLS}",
    f"{CALLS}{CALL}",
    f"{CALLS}{CALL}a",
    f"{CALLS}{CALL}a<｜tool▁s",
    f"{CALLS}{CALL}a{SEP}",
    f"{CALLS}{CALL}a{SEP}[1]{END_CALL}{END_CALLS}",
    f"{CALLS}{CALL}a{SEP}{END_CALL}{END_CALLS}",
    f"{CALLS}{CALL}{SEP}{{}}{END_CALL}{END_CALLS}",
    f"{CALLS}{CALL}a\nb{SEP}{{}}{END_CALL}{END_CALLS}",
    f"{CALLS}{CALL}a<b{SEP}{{}}{END_CALL}{END_CALLS}",
    f"{CALL}{'a' * 257}{SEP}{{}}",
    f"{END_CALL}{END_CALLS}{SEP}",
]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_what_the_model_means(output: Output) -> None:
    check(output, "deepseek_v31")


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_content_to_the_last_character(text: str) -> None:
    check(Output("", text, content=text), "deepseek_v31")


def test_arguments_go_out_as_they_come() -> None:
    deltas = deltas_of([f"{CALLS}{CALL}a<｜tool", '▁sep｜>{"city": "Pa', 'ris"}' + END_CALL], "deepseek_v31")
    assert [[(call.name, call.arguments) for call in delta.tool_calls] for delta in deltas] == [
        [],
        [("a", '{"city": "Pa')],
        [(None, 'ris"}')],
        [],
    ]
