"""The kernels around drafts find what their definitions find."""

from __future__ import annotations

from tests.kernels.apart import run_apart


def test_what_stands_and_where_drafts_go_is_that_of_the_definition() -> None:
    run_apart("interpreted_drafts")
