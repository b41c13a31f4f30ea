"""A regular expression means what Python's `re` means by it, or is refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.errors import RequestError
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.regex import to_xgrammar

from .conftest import Texts

ACCEPTED = [
    *("abc", "^abc$", "a|b", "^a|b$", "(a|b)c", "(?:ab)+", "(?P<n>a)b", "a*", "a{2,4}", "a{2,}", "a{3}", "a*?b", "x+?"),
    *("[a-z]+", "[^a-z]", r"\d+", r"\w", r"\s", r"\D", r"\W", r"\S", ".", ".{0,5}", "a.c", r"\.", r"[\d.]", r"[\]x]"),
    *(
        r"[a\-z]",
        r"[\w-]",
        "[-a]",
        "[a^]",
        r"[\^a]",
        r"[\^]",
        r"[^\^]",
        r"\^a",
        r"[\^\^]",
        r"[\s\S]",
        "[!-#]",
    ),
    *(r"\u00e9", r"\x41", r"[\x41-\x43]", r"\tab", r"[\ta]", r"\n", r"a\{2\}", "a-b", "x/y", "[/]", "#", "é+", "[é-ü]"),
    *("日|本", r"\d{2}-\d{2}", "(ab|cd){2}", "~`@&%=!<>,;:'\"", "()", "a{0}", "", "^$", "(a|)b", r"\\", r"[\\]"),
]
REFUSED = [
    *("(?i)a", "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?#c)a", "(?>a)", "(?s).", "a^b", "a$b", "(^a$)", "x^*"),
    *(
        r"\bfoo",
        r"(a)\1",
        r"\p{L}",
        r"\Z",
        r"\A",
        r"\cA",
        r"\0",
        r"\Qa",
        r"\z",
        r"\k<n>",
        r"\h",
        r"\R",
        "\\",
        r"\ud800",
    ),
    *("[[:alpha:]]", "[a", "[", "[]", r"[\^-z]", r"[a-\d]", r"[^\W\d]", "[z-a]"),
]


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_every_text_matches_as_python_says(pattern: str, texts: Texts) -> None:
    for text in texts(Constraint("regex", pattern)):
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_would_be_read_otherwise_is_refused_by_its_place(pattern: str) -> None:
    with pytest.raises(RequestError, match="at position") as caught:
        to_xgrammar(pattern)
    assert caught.value.code == "unsupported_regex"


@pytest.mark.parametrize("pattern", ["a++", "a{,3}", "(", "a)", "*", "a{3,1}", "a**"])
def test_what_is_no_pattern_is_refused_with_the_reason_of_xgrammar(pattern: str, texts: Texts) -> None:
    with pytest.raises(RequestError) as caught:
        texts(Constraint("regex", pattern))
    assert caught.value.code == "bad_grammar"
    assert "error at" in caught.value.found
    assert ".cc:" not in caught.value.found


IN_JSON = [
    *(
        r"^[\s\S]*$",
        r"^[\t ]$",
        r"^\s$",
        "^.$",
        "^[^a]$",
        "[^a]{2}b",
        r"^\W$",
        '["a]',
        "[!-#]",
        "(é|.|[^a]).-",
        ".{2}7",
    ),
    *(r'x["\\b]', r"[\x00-\x40]", r"[\t\n ]", ".*", "", "^a|b$", r"[ -~]", r"[\D_]x", r"[^\s]", r"(.|\d)?x", "[!-z]"),
    *(r"^a(x\d+)?c$", r"^a(x\d{1,3})?$", r"^a(x\d*)??c$", "^((x+)?y+)?z$", "^(?:a|b+)?c$", "^(a?b*)?c?$", r"^\}?a$"),
]


@pytest.mark.parametrize("pattern", IN_JSON)
def test_within_a_json_string_the_decoded_text_matches(pattern: str, texts: Texts) -> None:
    for text in texts(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern}))):
        assert re.search(pattern, json.loads(text), re.ASCII), text


@pytest.mark.parametrize("pattern", ['["]', r"[\\]", r"[\t\n]", r"[\x00-\x1f]", 'a"b', r"\\", r"\n", r"\x01|a"])
def test_what_must_be_escaped_in_json_is_refused_there(pattern: str) -> None:
    to_xgrammar(pattern)
    with pytest.raises(RequestError, match=r"nothing matches|must be escaped"):
        to_xgrammar(pattern, in_json=True)


characters = st.sampled_from(
    ["a", "b", "Z", "0", '"', "'", "\\\\", r"\.", r"\^", r"\-", r"\]", "-", " ", r"\t", "é", "/", r"\u0041"]
)
atoms = st.one_of(
    characters,
    st.sampled_from([".", r"\d", r"\w", r"\s", r"\S", "[^a]", "[a-f]", r"[\d_]", "[^0-9]"]),
    st.tuples(characters, characters).map(lambda pair: f"(?:{pair[0]}{pair[1]}+)?"),
    st.lists(characters.filter(lambda one: one != "-"), min_size=1, max_size=4).map(
        lambda parts: f"[{''.join(parts)}]"
    ),
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=patterns, in_json=st.booleans())
def test_any_pattern_is_understood_as_python_does(pattern: str, in_json: bool, texts: Texts) -> None:
    schema = Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    found, refused = [], ""
    try:
        found = texts(schema if in_json else Constraint("regex", pattern), count=8, ending=0)
    except RequestError as error:
        refused = error.found
    assert not refused or (in_json and re.search("nothing matches|must be escaped", refused))
    for text in found:
        assert re.fullmatch(pattern, json.loads(text) if in_json else text, re.ASCII), text
