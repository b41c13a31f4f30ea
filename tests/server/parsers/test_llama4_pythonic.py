"""Llama 4: a list of Python calls."""

from __future__ import annotations

import warnings

import pytest

from .outputs import Output, check, deltas_of, parse

OUTPUTS = [
    Output("no call", "It is sunny.\n", content="It is sunny.\n"),
    Output("one call", '[get_weather(city="Paris")]', calls=(("get_weather", '{"city": "Paris"}'),)),
    Output("no arguments", "[now()]", calls=(("now", "{}"),)),
    Output(
        "two calls",
        '[a(n=1, t="x"), b()]',
        calls=(("a", '{"n": 1, "t": "x"}'), ("b", "{}")),
    ),
    Output(
        "the tags",
        "<|python_start|>[a(n=1)]<|python_end|>",
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "words around the tags",
        "Look: <|python_start|> [a(n=1)] <|python_end|> Done.",
        content="Look: Done.",
        calls=(("a", '{"n": 1}'),),
    ),
    Output("words after the list", "[a()] and so on", content="and so on", calls=(("a", "{}"),)),
    Output(
        "words and a tag after the list",
        "[a()\n] x <|python_start|>y",
        content="x <|python_start|>y",
        calls=(("a", "{}"),),
    ),
    Output("only the first tag", "<|python_start|>[a()]", calls=(("a", "{}"),)),
    Output("over several lines", "\n[\n  a(\n    n=1,\n  ),\n  b()\n]\n", calls=(("a", '{"n": 1}'), ("b", "{}"))),
    Output(
        "every literal",
        "[a(i=-7, x=1.5, e=-1e3, t=True, f=False, n=None, s='x', l=[1, [2]], u=(1, 'y'), d={'k': {}}, h=0x10)]",
        calls=(
            (
                "a",
                '{"i": -7, "x": 1.5, "e": -1000.0, "t": true, "f": false, "n": null, "s": "x", "l": [1, [2]], '
                '"u": [1, "y"], "d": {"k": {}}, "h": 16}',
            ),
        ),
    ),
    Output(
        "JSON's words",
        "[a(t=true, f=[false], n={'k': null})]",
        calls=(("a", '{"t": true, "f": [false], "n": {"k": null}}'),),
    ),
    Output(
        "brackets and quotes inside strings",
        """[a(s="])'}", t='("[', u="it's", v='say "hi"')]""",
        calls=(("a", """{"s": "])'}", "t": "(\\"[", "u": "it's", "v": "say \\"hi\\""}"""),),
    ),
    Output(
        "escapes",
        r"""[a(s="\"])\\", t='\'\n\u00e9', u="\d")]""",
        calls=(("a", r'{"s": "\"])\\", "t": "' + r"'\né" + r'", "u": "\\d"}'),),
    ),
    Output(
        "long strings",
        '[a(s="""say "hi" it\'s\n)]""", u="", v=\'\')]',
        calls=(("a", '{"s": "say \\"hi\\" it\'s\\n)]", "u": "", "v": ""}'),),
    ),
    Output(
        "quotes in a long string",
        """[a(s='\''x""y' \\'\''')]""",
        calls=(("a", '{"s": "x\\"\\"y\' \'"}'),),
    ),
    Output("one quote in a long string", '[a(s="""5" wide)""")]', calls=(("a", '{"s": "5\\" wide)"}'),)),
    Output("strings side by side", "[a(s='x' \"y\")]", calls=(("a", '{"s": "xy"}'),)),
    Output(
        "letters of the world",
        '[wetter_北京(città="Zürich 🏔️")]',
        calls=(("wetter_北京", '{"città": "Zürich 🏔️"}'),),
    ),
    Output("names with dots and dashes", "[a.b-c(n=1)]", calls=(("a.b-c", '{"n": 1}'),)),
    Output("half a character", r"[a(s='\ud800')]", calls=(("a", r'{"s": "\ud800"}'),)),
    Output("tags inside strings", "[a(s='<|python_end|>')]", calls=(("a", '{"s": "<|python_end|>"}'),)),
    Output("the list is not closed", "[a(n=1)", calls=(("a", '{"n": 1}'),)),
    Output("the list is not closed before the tag", "<|python_start|>[a()<|python_end|>", calls=(("a", "{}"),)),
    Output("cut off in the second call", "[a(n=1), b(n=", content=", b(n=", calls=(("a", '{"n": 1}'),)),
    Output("cut off after a comma", "[a(n=1),", content=",", calls=(("a", '{"n": 1}'),)),
    Output("a second call that is none", "[a(n=1), b(2)] x", content=", b(2)] x", calls=(("a", '{"n": 1}'),)),
    Output("no comma between calls", "[a() b()]", content="b()]", calls=(("a", "{}"),)),
    Output(
        "two lists between tags",
        "<|python_start|>[a()]<|python_end|><|python_start|>[b()]<|python_end|><|python_end|>",
        content="<|python_end|>",
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "content, then a list after the tag",
        "[1] said so.<|python_start|>[a()]",
        content="[1] said so.",
        calls=(("a", "{}"),),
    ),
]

NO_CALLS = [
    "[1] is a source, [a](b) is a link",
    "see [a(n=1)]",
    "[",
    " [ ] ",
    "[Note] this",
    "[a",
    "[a]",
    "[a(",
    "[a(n=1",
    "[a(n='",
    "[a(n='''x''",
    "[a(n='x\\",
    "[a(1)]",
    "[a(*b)]",
    "[a(**b)]",
    "[a(**{'n': 1})]",
    "[a(n=b)]",
    "[a(n=b())]",
    "[a(n=1+1)]",
    "[a(n=-'x')]",
    "[a(n=--1)]",
    "[a(n=1j)]",
    "[a(n=b'x')]",
    "[a(n=...)]",
    "[a(n={1})]",
    "[a(n={1: 2})]",
    "[a(n={**b})]",
    "[a(n=f'{b}')]",
    "[a(n=1e999)]",
    "[a(n=0x" + "f" * 5000 + ")]",
    "[a(n=" + "9" * 5000 + ")]",
    "[a(n='\0')]\0",
    "[a(n=x for x in y)]",
    "[a(n=__import__('os').system('true'))]",
    "[a(n=(lambda: 1)())]",
    "[a(n='x\ny')]",
    "[a(n=[)]",
    "[1a()]",
    "[-a()]",
    f"[{'a' * 257}()]",
    "<|python_start|>",
    "<|python_start|>print(1)<|python_end|>",
    "<|python_start|>[]<|python_end|>",
    "see <|python_sta",
]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_what_the_model_means(output: Output) -> None:
    check(output, "llama4_pythonic")


@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: text[:24])
def test_what_only_looks_like_a_call_is_content_to_the_last_character(text: str) -> None:
    if len(text) < 1000:
        check(Output("", text, content=text), "llama4_pythonic")
    else:
        assert parse(list(text), "llama4_pythonic").content == text


def test_each_call_goes_out_when_it_is_complete() -> None:
    deltas = deltas_of(["[a(n=1", "), b(", ")", "]"], "llama4_pythonic")
    assert [[(call.name, call.arguments) for call in delta.tool_calls] for delta in deltas] == [
        [],
        [("a", '{"n": 1}')],
        [("b", "{}")],
        [],
        [],
    ]


def test_odd_escapes_warn_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse([r"[a(s='\d')]"], "llama4_pythonic").calls == (("a", r'{"s": "\\d"}'),)
