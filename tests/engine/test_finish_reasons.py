"""Why a request ends."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.engine.request import Phase, Request
from phalanx.engine.sampling import SamplingParams

from .books import EOS, answer_alone, check_empty, make_engine, run

PROMPT = [1, 2, 3, 4, 5]
CONTEXT = 48
FREE, _ = answer_alone(PROMPT, SamplingParams(max_tokens=None, seed=0, ignore_eos=True), CONTEXT)
"""What the model says when nothing stops it."""
FIRST_EOS = FREE.index(EOS)
SECOND_EOS = FREE.index(EOS, FIRST_EOS + 1)


def finish(depth: int, **values: Any) -> Request:
    engine, _ = make_engine(depth=depth, max_model_len=CONTEXT)
    request = engine.add(PROMPT, SamplingParams(seed=0, **values))
    outputs = run(engine)
    assert [output.token for output in outputs] == request.output == FREE[: len(request.output)]
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [request.finish_reason]
    assert request.phase is Phase.FINISHED
    check_empty(engine.scheduler)
    return request


pytestmark = pytest.mark.parametrize("depth", [1, 2])


def test_the_end_of_sequence_token_stops_and_is_part_of_the_answer(depth: int) -> None:
    request = finish(depth, max_tokens=None)
    assert (request.output, request.finish_reason) == (FREE[: FIRST_EOS + 1], "stop")


def test_ignore_eos_goes_on_to_the_next_limit(depth: int) -> None:
    request = finish(depth, max_tokens=SECOND_EOS + 2, ignore_eos=True)
    assert (len(request.output), request.finish_reason) == (SECOND_EOS + 2, "length")


def test_a_stop_token_stops(depth: int) -> None:
    stop = next(token for token in FREE[1:] if token not in (EOS, FREE[0]))
    request = finish(depth, max_tokens=None, stop_token_ids=[stop], ignore_eos=True)
    assert (request.output, request.finish_reason) == (FREE[: FREE.index(stop) + 1], "stop")


def test_min_tokens_delays_the_end(depth: int) -> None:
    request = finish(depth, max_tokens=None, min_tokens=FIRST_EOS + 2)
    assert (len(request.output), request.finish_reason) == (SECOND_EOS + 1, "stop")
    request = finish(depth, max_tokens=None, min_tokens=SECOND_EOS + 1)
    assert (len(request.output), request.finish_reason) == (SECOND_EOS + 1, "stop")


def test_min_tokens_delays_stop_tokens_too(depth: int) -> None:
    stop = FREE[0]
    later = FREE.index(stop, 1)
    request = finish(depth, max_tokens=None, min_tokens=2, stop_token_ids=[stop], ignore_eos=True)
    assert (len(request.output), request.finish_reason) == (later + 1, "stop")


@pytest.mark.parametrize("most", [1, 2, 9])
def test_max_tokens_is_a_length(depth: int, most: int) -> None:
    request = finish(depth, max_tokens=most, ignore_eos=True)
    assert (len(request.output), request.finish_reason) == (most, "length")


def test_a_stop_in_the_last_token_is_a_stop(depth: int) -> None:
    request = finish(depth, max_tokens=FIRST_EOS + 1)
    assert (len(request.output), request.finish_reason) == (FIRST_EOS + 1, "stop")


@pytest.mark.parametrize("most", [None, 1000])
def test_the_context_is_a_length(depth: int, most: int | None) -> None:
    request = finish(depth, max_tokens=most, ignore_eos=True)
    assert (len(request.tokens), request.finish_reason) == (CONTEXT, "length")
