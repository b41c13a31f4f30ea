"""A grammar is walked through before the engine sees it."""

from __future__ import annotations

import pytest

from phalanx.errors import RequestError
from phalanx.server.grammar.constraint import Constraint, to_xgrammar
from phalanx.server.grammar.matcher import Grammars
from phalanx.server.grammar.worker import walk
from tests.byte_model import EOS


def try_out(grammars: Grammars, constraint: Constraint) -> None:
    walk(grammars, grammars.pack(to_xgrammar(constraint)), [EOS])


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_object"),
        Constraint("regex", "[a-z]*"),
        Constraint("choice", '[""]'),
        Constraint("choice", '["a"]'),
        Constraint("grammar", 'root ::= "a" root | "b"'),
        Constraint("structural_tag", '{"format": {"type": "any_text"}}'),
    ],
)
def test_an_honest_grammar_passes(constraint: Constraint, grammars: Grammars) -> None:
    try_out(grammars, constraint)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" x\nx ::= x "b"',
        'root ::= "a" "b" "c" x | "a" "b"\nx ::= x',
        'root ::= x\nx ::= x "a"',
    ],
)
def test_a_dead_end_is_found(grammar: str, grammars: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        try_out(grammars, Constraint("grammar", grammar))
    assert caught.value.code == "grammar_dead_end"


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("grammar", 'root ::= root root root | root root | "a"'),
        Constraint("grammar", 'root ::= (("a"*)*)*'),
        Constraint("regex", "(a{1,1000}){1,1000}"),
        Constraint("regex", "((a{1,100}){1,100}){1,100}"),
    ],
)
def test_a_grammar_that_would_slow_the_engine_down_is_found(constraint: Constraint, grammars: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        try_out(grammars, constraint)
    assert caught.value.code == "grammar_too_complex"
