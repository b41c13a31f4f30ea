"""The kernels that look tokens up find what their definitions find."""

from __future__ import annotations

from tests.kernels.apart import run_apart


def test_tokens_and_places_are_those_of_the_definition() -> None:
    run_apart("interpreted_lookup")
