"""Texts made by grammars from random tokens: what a model could say at the worst."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from phalanx.server.grammar.constraint import Constraint, to_xgrammar
from phalanx.server.grammar.matcher import Grammars
from tests.byte_model import make_grammars, random_text

Texts = Callable[..., list[str]]


@pytest.fixture(scope="session")
def grammars() -> Grammars:
    return make_grammars()


@pytest.fixture(scope="session")
def texts(grammars: Grammars) -> Texts:
    """Random texts of a constraint that come to an end. Free text among it may be no UTF-8, all else is."""

    def make(constraint: Constraint, count: int = 40, has_free_text: bool = False, ending: float = 0.5) -> list[str]:
        grammar, rng = grammars.pack(to_xgrammar(constraint)), random.Random(0)
        found = [random_text(grammars.matcher(grammar), rng) for _ in range(count)]
        errors = "replace" if has_free_text else "strict"
        whole = [text.decode(errors=errors) for text in found if text is not None]
        assert len(whole) >= count * ending, f"only {len(whole)} of {count} texts came to an end"
        return whole

    return make
