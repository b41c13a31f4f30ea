"""What a request may ask for: every bound, named with its numbers, refused before anything is booked."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from phalanx.engine.sampling import (
    COUNT_LIMIT,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    SEED_LIMIT,
    SamplingParams,
)
from phalanx.engine.step_plan import Admission, StepPlan, StepResult, TokenLogprobs
from phalanx.errors import RequestError

from .books import VOCAB, check_answer, check_books, check_empty, greedy, make_engine, run

WHOLE_NUMBERS: dict[str, tuple[int, int | None]] = {
    "n": (1, MAX_CHOICES),
    "max_tokens": (0, None),
    "min_tokens": (0, 256),
    "top_k": (0, None),
    "seed": (-SEED_LIMIT, SEED_LIMIT - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (-COUNT_LIMIT, COUNT_LIMIT),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
ABOVE_ZERO: dict[str, float] = {"top_p": 1.0, "repetition_penalty": 100.0}
ALL_NUMBERS = [*NUMBERS, *ABOVE_ZERO]


def refused(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        SamplingParams(**values)
    assert error.value.code == "bad_parameter"
    assert error.value.to_dict() == {"code": "bad_parameter", "found": error.value.found, "fix": error.value.fix}
    return error.value


def accepted(**values: Any) -> SamplingParams:
    return SamplingParams(**values)


def round_trip(params: SamplingParams) -> SamplingParams:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers_have_bounds(name: str) -> None:
    low, high = WHOLE_NUMBERS[name]
    assert getattr(accepted(**{name: low}), name) == low
    error = refused(**{name: low - 1})
    assert error.found == f"{name} is {low - 1}."
    assert str(low) in error.fix
    if high is not None:
        assert getattr(accepted(**{name: high}), name) == high
        error = refused(**{name: high + 1})
        assert error.found == f"{name} is {high + 1}."
        assert f"from {low} to {high}" in error.fix


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [True, 1.0, "1", math.nan, [1]])
def test_whole_numbers_are_whole(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.found == f"{name} is {value!r}."
    assert "whole number" in error.fix


@pytest.mark.parametrize("name", ["n", "min_tokens", "top_k"])
def test_only_some_may_be_left_out(name: str) -> None:
    refused(**{name: None})
    assert SamplingParams(max_tokens=None, seed=None, logprobs=None).max_tokens is None


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "min_tokens"])
def test_a_number_no_rank_can_be_told_is_refused(name: str) -> None:
    assert name in refused(**{"max_tokens": None, name: 2**64}).found


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    error = refused(max_tokens=3, min_tokens=4)
    assert "min_tokens is 4" in error.found
    assert "from 0 to 3" in error.fix
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_bounds(name: str) -> None:
    low, high = NUMBERS[name]
    for inside in (low, high, (low + high) / 2, int(high)):
        assert getattr(accepted(**{name: inside}), name) == inside
    for outside in (math.nextafter(low, -math.inf), low - 1, math.nextafter(high, math.inf), high + 1):
        error = refused(**{name: outside})
        assert error.found == f"{name} is {outside}."
        assert f"from {low:g} to {high:g}" in error.fix


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_some_numbers_are_above_zero(name: str) -> None:
    high = ABOVE_ZERO[name]
    for inside in (5e-324, high, 1):
        assert getattr(accepted(**{name: inside}), name) == inside
    for outside in (0.0, 0, -0.0, -1.0, math.nextafter(high, math.inf)):
        assert f"above 0 and at most {high:g}" in refused(**{name: outside}).fix


@pytest.mark.parametrize("name", ALL_NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name: str, value: float) -> None:
    assert refused(**{name: value}).found == f"{name} is {value}."


@pytest.mark.parametrize("name", ALL_NUMBERS)
@pytest.mark.parametrize("value", [True, False, None, "1", [1.0]])
def test_numbers_are_numbers(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.found == f"{name} is {value!r}."
    assert "a number" in error.fix


@pytest.mark.parametrize("name", ALL_NUMBERS)
def test_a_whole_number_too_large_for_a_float_is_refused_like_any_other(name: str) -> None:
    refused(**{name: 10**400})


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 100.5, -101, True, "1", None])
def test_each_logit_bias_is_checked(bias: Any) -> None:
    assert "logit_bias[3]" in refused(logit_bias={2: 1.0, 3: bias}).found


def test_lists_have_a_longest_length() -> None:
    longest = dict.fromkeys(range(MAX_LOGIT_BIAS), 0.5)
    assert len(SamplingParams(logit_bias=longest).logit_bias) == MAX_LOGIT_BIAS
    error = refused(logit_bias={**longest, MAX_LOGIT_BIAS: 0.5})
    assert str(MAX_LOGIT_BIAS + 1) in error.found
    assert f"from 0 to {MAX_LOGIT_BIAS}" in error.fix
    assert len(SamplingParams(stop=["x"] * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS
    error = refused(stop=["x"] * (MAX_STOP_STRINGS + 1))
    assert str(MAX_STOP_STRINGS + 1) in error.found
    assert f"from 0 to {MAX_STOP_STRINGS}" in error.fix


def test_a_stop_string_has_at_least_one_character() -> None:
    assert "empty string" in refused(stop=["end", ""]).found


@pytest.mark.parametrize("values", [{"stop": [3]}, {"stop": ["\ud800"]}, {"ignore_eos": 1}])
def test_what_a_rank_cannot_decode_is_refused(values: dict[str, Any]) -> None:
    refused(**values)


def test_the_same_bounds_hold_for_params_read_from_json() -> None:
    with pytest.raises(RequestError) as error:
        msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)
    assert "temperature is -1" in error.value.found


def test_penalties_are_off_by_default() -> None:
    assert not SamplingParams().penalised
    for name, value in {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.5}.items():
        assert accepted(**{name: value}).penalised


@pytest.mark.parametrize(
    ("prompt", "values", "code", "numbers"),
    [
        ([], {}, "empty_prompt", []),
        ([1] * 16, {}, "prompt_too_long", ["16", "15"]),
        ([1] * 40, {}, "prompt_too_long", ["40", "16", "15"]),
        ([1, VOCAB], {}, "token_out_of_range", [str(VOCAB), "index 1", str(VOCAB - 1)]),
        ([-1], {}, "token_out_of_range", ["-1", "index 0"]),
        ([1, 2, True], {}, "token_out_of_range", ["True", "index 2"]),
        ([1.0], {}, "token_out_of_range", ["1.0"]),
        (["1"], {}, "token_out_of_range", ["'1'"]),
        ([None], {}, "token_out_of_range", ["None"]),
        ([1], {"stop_token_ids": [1, VOCAB]}, "token_out_of_range", ["stop_token_ids", str(VOCAB), "index 1"]),
        ([1], {"stop_token_ids": [-1]}, "token_out_of_range", ["stop_token_ids", "-1"]),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "token_out_of_range", ["logit_bias", str(VOCAB)]),
        ([1], {"logit_bias": {-3: 1.0}}, "token_out_of_range", ["logit_bias", "-3"]),
    ],
)
def test_the_engine_refuses_a_bad_request_and_the_others_go_on(
    prompt: list[Any], values: dict[str, Any], code: str, numbers: list[str]
) -> None:
    engine, _ = make_engine(max_model_len=16, num_blocks=8)
    running, waiting = engine.add([1, 2, 3], greedy(6)), engine.add([1, 2, 3, 4, 5], greedy(4))
    engine.step()
    with pytest.raises(RequestError) as error:
        engine.add(prompt, SamplingParams(**values))
    assert error.value.code == code
    for number in numbers:
        assert number in f"{error.value.found} {error.value.fix}"
    assert list(engine.scheduler.requests) == [running.id, waiting.id]
    check_books(engine.scheduler)
    run(engine)
    check_answer(running, 16)
    check_answer(waiting, 16)
    check_empty(engine.scheduler)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    engine, _ = make_engine(max_model_len=16, num_blocks=4)
    request = engine.add([VOCAB - 1] * 15, greedy(None))
    run(engine)
    assert (len(request.output), request.finish_reason) == (1, "length")


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    engine, _ = make_engine()
    seeds = [engine.add([1], SamplingParams()).seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert engine.add([1], SamplingParams(seed=-5)).seed == -5


def test_plans_and_results_survive_the_wire() -> None:
    params = SamplingParams(
        max_tokens=None,
        temperature=0.5,
        logit_bias={3: -1.5},
        seed=-SEED_LIMIT,
        stop=["é", "\n"],
        stop_token_ids=[1, 2],
        logprobs=20,
        ignore_eos=True,
    )
    admission = Admission(1, 2, [5, 6, 7], SEED_LIMIT - 1, params)
    plan = StepPlan(7, [admission], [0, 1], [9, 0], [1, 3], [1, 0], [(1, [4])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert plan.num_tokens == 4
    result = StepResult(7, [3], [TokenLogprobs(-0.25, [(3, -0.25), (4, -1.5)])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    assert round_trip(SamplingParams()) == SamplingParams()
