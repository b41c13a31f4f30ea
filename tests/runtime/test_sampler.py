"""The sampler draws what transformers' own logits processors allow, as often, and alike in any company."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phalanx.engine.sampling import SamplingParams
from phalanx.kernels import sampling
from phalanx.kernels.sampling import uniform
from phalanx.kernels.sampling_table import TOKEN
from phalanx.runtime import sampler
from phalanx.runtime.sampler import Sampled, Sampler, SamplingRows
from tests.runtime.seats import Seat, seated

VOCAB = 24
EOS = 3
SWEEP = 1000
NOTHING_SAID = [0]


def bell_logits(vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def a_row(position: int = 1, seed: int = 7, prompt_length: int = 1, **params: Any) -> Seat:
    return Seat(SamplingParams(**params), position, seed, prompt_length)


def sample(logits: Tensor, seats: list[Seat], history: list[int] | None = None) -> Sampled:
    """Every row sees the same logits, if only one is given, and the same history."""
    batch, rows = seated([replace(seat, history=history or NOTHING_SAID) for seat in seats])
    logits = logits.repeat(len(rows), 1) if logits.dim() == 1 else logits.clone()
    return Sampler([EOS])(logits, rows, batch)


def draw(logits: Tensor, row: Seat, history: list[int] | None = None) -> int:
    return int(sample(logits, [row], history).tokens[0])


def sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draw be the seed's share of the way from 0 to 1."""
    monkeypatch.setattr(sampling, "uniform", lambda seeds, positions: (seeds.double() + 0.5) / SWEEP)


def frequencies(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, history: list[int] = NOTHING_SAID, **params: Any
) -> Tensor:
    """How often each token comes when the draw sweeps [0, 1) evenly: its probability, to within one part in SWEEP."""
    sweep(monkeypatch)
    prompt_length = params.pop("prompt_length", 1)
    rows = [a_row(len(history), seed, prompt_length, **params) for seed in range(SWEEP)]
    return torch.bincount(sample(logits, rows, history).tokens, minlength=len(logits)) / SWEEP


def reference(logits: Tensor, history: list[int] = NOTHING_SAID, **params: float) -> Tensor:
    """Phalanx applies temperature, then min-p, then top-k, then top-p; so here do transformers' processors."""
    processors = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "min_p": MinPLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
    }
    scores = logits[None].clone()
    for name, processor in processors.items():
        if name in params:
            scores = processor(params[name])(torch.tensor([history]), scores)
    return scores.softmax(-1)[0]


def assert_same_distribution(found: Tensor, expected: Tensor) -> None:
    """The same tokens can be drawn, with the same probabilities."""
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() <= 1.001 / SWEEP


@pytest.mark.parametrize(
    "params",
    [
        {},
        *({"temperature": value} for value in (0.1, 0.7, 1.5, 10.0)),
        *({"top_k": value} for value in (1, 2, 5, VOCAB - 1, VOCAB, 1000)),
        *({"top_p": value} for value in (0.01, 0.3, 0.5, 0.8, 0.95, 0.999)),
        *({"min_p": value} for value in (0.01, 0.1, 0.5, 1.0)),
        {"temperature": 2.0, "top_k": 8, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.1, "top_p": 0.7},
        {"temperature": 0.6, "min_p": 0.02, "top_k": 6, "top_p": 0.9},
        {"temperature": 3.0, "min_p": 0.05, "top_k": 10, "top_p": 0.8, "repetition_penalty": 1.8},
    ],
    ids=str,
)
def test_tokens_and_their_probabilities_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    for seed in range(2):
        logits, history = bell_logits(seed=seed), [5, 9, 9, 11]
        found = frequencies(monkeypatch, logits, history, **params)
        assert_same_distribution(found, reference(logits, history, **params))


def test_every_row_is_filtered_by_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5, "top_k": 9}]
    sweep(monkeypatch)
    rows = [a_row(seed=seed, **params) for seed in range(SWEEP) for params in kinds]
    tokens = sample(bell_logits(), rows).tokens.view(SWEEP, len(kinds))
    for index, params in enumerate(kinds):
        found = torch.bincount(tokens[:, index], minlength=VOCAB) / SWEEP
        assert_same_distribution(found, reference(bell_logits(), **params))


def test_draws_by_seed_and_position_follow_the_distribution() -> None:
    """Chi-square with 23 degrees of freedom: a mean of 23, and below 58 in all but one case of ten thousand."""
    expected = bell_logits().mul(0.5).softmax(-1) * SWEEP
    for rows in (
        [a_row(position, temperature=2.0) for position in range(1, SWEEP + 1)],
        [a_row(seed=seed, temperature=2.0) for seed in range(SWEEP)],
    ):
        found = torch.bincount(sample(bell_logits(), rows).tokens, minlength=VOCAB)
        assert ((found - expected) ** 2 / expected).sum() < 58


def test_temperature_zero_takes_the_likeliest_whatever_else_is_asked() -> None:
    logits = torch.stack([bell_logits(seed=seed) for seed in range(20)])
    rows = [a_row(temperature=0, top_k=5, top_p=0.1, min_p=0.5, seed=seed) for seed in range(20)]
    assert sample(logits, rows).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 1e-40, 1e-300])
def test_the_smallest_temperatures_come_to_the_likeliest_token(temperature: float) -> None:
    assert draw(bell_logits(), a_row(temperature=temperature)) == bell_logits().argmax()


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (0.5, 0.3), (-1.0, -0.5)])
def test_presence_and_frequency_follow_the_openai_formula(
    monkeypatch: pytest.MonkeyPatch, presence: float, frequency: float
) -> None:
    """logit - count * frequency - (count > 0) * presence, counts being those of the output."""
    prompt, output = [1, 2, 8], [4, 4, 4, 2, 17]
    expected = bell_logits()
    for token in set(output):
        expected[token] -= output.count(token) * frequency + presence
    params = {"presence_penalty": presence, "frequency_penalty": frequency, "prompt_length": 3}
    assert_same_distribution(frequencies(monkeypatch, bell_logits(), prompt + output, **params), expected.softmax(-1))


@pytest.mark.parametrize(
    ("penalty", "prompt_counts"),
    [({"repetition_penalty": 3.0}, True), ({"presence_penalty": 2.0}, False), ({"frequency_penalty": 2.0}, False)],
)
def test_only_repetition_penalty_looks_at_the_prompt(
    monkeypatch: pytest.MonkeyPatch, penalty: dict[str, float], prompt_counts: bool
) -> None:
    """One history, cut into prompt and output before or after the token in question."""
    logits, history = torch.zeros(VOCAB).index_fill_(0, torch.tensor([6]), 2.0), [6, 1]
    free = logits.softmax(-1)[6]
    in_prompt = frequencies(monkeypatch, logits, history, prompt_length=1, **penalty)[6]
    in_output = frequencies(monkeypatch, logits, history, prompt_length=0, **penalty)[6]
    assert in_output < free / 2
    assert (in_prompt < free / 2) == prompt_counts


def test_repetition_penalty_counts_a_token_once_and_never_looks_past_the_present(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, past, stale = bell_logits(), [2, 5, 5, 5, 7], [9, 10]
    expected = reference(logits, [2, 5, 7], repetition_penalty=1.7)
    assert_same_distribution(frequencies(monkeypatch, logits, past, repetition_penalty=1.7), expected)
    rows = [a_row(len(past), seed, repetition_penalty=1.7) for seed in range(SWEEP)]
    found = torch.bincount(sample(logits, rows, past + stale).tokens, minlength=VOCAB) / SWEEP
    assert_same_distribution(found, expected)


def test_penalties_use_the_history_of_the_rows_own_slot() -> None:
    logits = torch.zeros(2, VOCAB).index_fill_(1, torch.tensor([4, 5]), 9.0)
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    batch, rows = seated([Seat(params, 1, 0, 0, history=[token]) for token in (4, 5)], order=[1, 0])
    assert Sampler([])(logits, rows, batch).tokens.tolist() == [4, 5]
    assert batch.tokens.latest[:2].tolist() == [5, 4], "tokens are kept by slot"
    assert batch.tokens.latest_at[:2].tolist() == [1, 1]


def test_rows_penalised_together_have_each_their_own_penalties_and_past(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, seats = random.Random(4), []
    for _ in range(60):
        length = rng.randint(2, 30)
        params = SamplingParams(
            temperature=0,
            repetition_penalty=rng.choice([1.0, 1.3, 3.0]),
            presence_penalty=rng.choice([0.0, 0.4, -1.5]),
            frequency_penalty=rng.choice([0.0, 0.2, 1.9]),
        )
        past = [rng.randrange(VOCAB) for _ in range(length)]
        seats.append(Seat(params, length, prompt_length=rng.randint(0, length), history=past))
    logits = torch.stack([bell_logits(seed=seed) for seed in range(60)])
    batch, rows = seated(seats)
    together = Sampler([])(logits.clone(), rows, batch).tokens.tolist()
    monkeypatch.setattr(sampler, "MOST_PENALTY_BYTES", 3000)
    assert Sampler([])(logits.clone(), rows, batch).tokens.tolist() == together, "or a few of them at a time"
    assert together == [draw(row, seat, list(seat.history)) for row, seat in zip(logits, seats, strict=True)]
    assert together != logits.argmax(-1).tolist()


def test_bias_is_added_and_a_hundred_forces_and_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    best, expected = int(bell_logits().argmax()), bell_logits()
    forced = [a_row(seed=seed, logit_bias={11: 100.0}) for seed in range(200)]
    banned = [a_row(seed=seed, logit_bias={best: -100.0}) for seed in range(200)]
    assert set(sample(bell_logits(), forced).tokens.tolist()) == {11}
    assert best not in sample(bell_logits(), banned).tokens.tolist()
    assert draw(bell_logits(), a_row(temperature=0, logit_bias={11: 100.0})) == 11
    assert draw(bell_logits(), a_row(temperature=0)) == best
    expected[[2, 20]] += torch.tensor([1.25, -0.5])
    found = frequencies(monkeypatch, bell_logits(), logit_bias={2: 1.25, 20: -0.5})
    assert_same_distribution(found, expected.softmax(-1))


@pytest.mark.parametrize(
    ("produced", "ignore_eos", "possible"),
    [(0, False, {0}), (1, False, {0}), (2, False, {0, EOS, 8}), (1, True, {0, EOS}), (2, True, {0, EOS, 8})],
)
def test_min_tokens_holds_back_eos_and_stop_tokens(produced: int, ignore_eos: bool, possible: set[int]) -> None:
    """With ignore_eos the eos ends nothing, so it need not be held back."""
    logits = torch.full((VOCAB,), -torch.inf).index_fill_(0, torch.tensor([0, EOS, 8]), 0.0)
    params = {"min_tokens": 2, "stop_token_ids": [8], "ignore_eos": ignore_eos}
    rows = [a_row(4 + produced, seed, prompt_length=4, **params) for seed in range(100)]
    assert set(sample(logits, rows, [0] * 8).tokens.tolist()) == possible


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    """Before bias, penalties, temperature and filters; of the drawn token, and of as many as each row asks for."""
    logits = torch.stack([bell_logits(seed=seed) for seed in range(4)])
    changed: dict[str, Any] = {"temperature": 0.3, "repetition_penalty": 5.0, "top_k": 4, "logit_bias": {1: 3.0}}
    seats = [a_row(logprobs=count, min_tokens=9, **changed) for count in (5, None, 0, 20)]
    sampled, (_, rows) = sample(logits, seats, [1, 2, 3]), seated(seats)
    expected = torch.log_softmax(logits, -1)
    _, read = sampled.read(rows)
    assert read[1] is None
    assert sample(logits[1], seats[1:2]).read(seated(seats[1:2])[1])[1] == [None]
    for index, count in ((0, 5), (2, 0), (3, 20)):
        found, best = read[index], expected[index].topk(count)
        assert found is not None
        assert found.sampled == expected[index, sampled.tokens[index]].item()
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == best.values.tolist()


def test_rows_with_wishes_leave_the_tokens_of_plain_rows_as_they_were_chosen() -> None:
    """As a graph has chosen them; only the others are chosen anew, and only they have log-probabilities."""
    logits = torch.stack([bell_logits(seed=seed) for seed in range(5)])
    wishes: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"temperature": 0},
        {"logit_bias": {6: 100.0}},
        {"logprobs": 1},
    ]
    seats = [a_row(seed=index, **wish) for index, wish in enumerate(wishes)]
    batch, rows = seated(seats)
    chosen = torch.tensor([20, 21, 22, 23, 19], dtype=TOKEN)
    sampled = Sampler([EOS])(logits.clone(), rows, batch, chosen)
    alone = [draw(row, seat) for row, seat in zip(logits, seats, strict=True)]
    assert sampled.tokens.tolist() == [20, alone[1], 22, 6, alone[4]]
    assert chosen.tolist() == [20, 21, 22, 23, 19]
    pool = batch.tokens.latest[rows.slots].tolist()
    assert [pool[index] for index in (1, 3, 4)] == [alone[1], 6, alone[4]]
    _, read = sampled.read(rows)
    expected = torch.log_softmax(logits, -1)
    assert [None if found is None else found.sampled for found in read] == [
        expected[index, alone[index]].item() if index in (1, 4) else None for index in range(5)
    ]
    assert [len(found.top) for found in read if found is not None] == [2, 1]


def test_a_graph_whose_rows_yield_no_token_leaves_nothing_to_sample() -> None:
    batch, _ = seated([a_row()])
    nobody = SamplingRows([], [], [], drawn=False)
    sampled = Sampler([EOS])(torch.zeros(0, VOCAB), nobody, batch, torch.zeros(0, dtype=torch.int64))
    assert sampled.read(nobody) == ([], [])


COMPANY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "hot": {"temperature": 5.0},
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "penalties": {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {4: 50.0}, "logprobs": 5},
}


@pytest.mark.parametrize("own", [{}, {"min_p": 0.02}, {"top_k": 12}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("company", COMPANY)
def test_a_rows_tokens_do_not_depend_on_its_neighbours(company: str, own: dict[str, Any]) -> None:
    neighbours = [a_row(9, seed, **COMPANY[company]) for seed in range(3)]
    history = [0] * 60
    rows = [a_row(position, seed=31, **own) for position in range(1, 30)]
    alone = [draw(bell_logits(), row, history) for row in rows]
    for place in (0, 1, 3):
        together = [*neighbours[:place], *rows, *neighbours[place:]]
        assert sample(bell_logits(), together, history).tokens[place : place + len(rows)].tolist() == alone
    assert sample(bell_logits(), [*neighbours, rows[-1]], history).tokens[-1] == alone[-1]


@pytest.mark.parametrize("neighbour", [{"top_k": 50}, {"top_p": 0.9}], ids=str)
def test_ties_are_broken_alike_in_any_company(neighbour: dict[str, Any]) -> None:
    """Sixteen-bit models give many equal logits, and top-k has to choose among them."""
    logits, history = bell_logits(4096).round(), [0] * 60
    rows = [a_row(position, top_k=5) for position in range(1, 50)]
    alone = sample(logits, rows, history).tokens.tolist()
    assert sample(logits, [*rows, a_row(**neighbour)], history).tokens.tolist()[:-1] == alone


def test_seed_and_position_both_change_the_draw() -> None:
    flat = torch.zeros(1000)
    by_position = sample(flat, [a_row(position) for position in range(1, 257)]).tokens
    by_seed = sample(flat, [a_row(seed=seed) for seed in range(256)]).tokens
    assert by_position.unique().numel() > 200
    assert by_seed.unique().numel() > 200


def test_uniform_never_changes() -> None:
    """A seed that a client keeps gives the same text with the next version."""
    kept = {
        (0, 0): 0.6770604418448546,
        (0, 1): 0.7411796405218095,
        (1, 0): 0.9557038184179468,
        (42, 1000): 0.46583920998737527,
        (-1, 5): 0.07986438676810048,
        (2**63 - 1, 9): 0.16737398245402046,
    }
    seeds, positions = torch.tensor(list(kept)).unbind(1)
    assert uniform(seeds, positions).tolist() == list(kept.values())


@pytest.mark.parametrize("along", ["positions", "seeds", "neighbouring pairs"])
def test_uniform_is_uniform(along: str) -> None:
    """Kolmogorov-Smirnov: the empirical distribution strays from the line by less than 1.95 / sqrt(n), p = 0.001."""
    count = 20_000
    numbers, same = torch.arange(2 * count), torch.full((2 * count,), 17)
    draws = {
        "positions": uniform(same, numbers)[:count],
        "seeds": uniform(numbers, same)[:count],
        "neighbouring pairs": uniform(same, numbers).view(count, 2).sum(1) % 1.0,
    }[along].tolist()
    assert all(0.0 <= value < 1.0 for value in draws)
    stray = max(abs(value - (index + 0.5) / count) for index, value in enumerate(sorted(draws)))
    assert stray < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("extreme", [0.0, 2.0**-53, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, extreme: float, params: dict[str, Any]
) -> None:
    """Not at either end of the draw, wherever the forbidden tokens stand; peaked and flat distributions alike."""
    monkeypatch.setattr(
        sampling, "uniform", lambda seeds, positions: torch.full(seeds.shape, extreme, dtype=torch.float64)
    )
    rng = random.Random(1)
    for count in (1, 2, 3, 12):
        allowed = rng.sample(range(VOCAB), count)
        for spread in (0.0, 1.0, 500.0):
            logits = torch.full((VOCAB,), -torch.inf)
            logits[allowed] = torch.tensor([spread * rng.random() for _ in allowed])
            token = draw(logits, a_row(**params))
            assert logits.softmax(-1)[token] > 0


def test_a_token_owns_its_interval_from_the_border_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal tokens among impossible ones: the draw 0.25 is the second one's, all below the first one's."""
    logits = torch.full((8,), -torch.inf).index_fill_(0, torch.tensor([1, 3, 4, 6]), 0.0)
    draws = {0.0: 1, 0.25 - 2.0**-53: 1, 0.25: 3, 0.5: 4, 0.75 - 2.0**-53: 4, 0.75: 6, 1.0 - 2.0**-53: 6}
    for value, token in draws.items():
        exactly = torch.tensor([value], dtype=torch.float64)
        monkeypatch.setattr(sampling, "uniform", lambda seeds, positions, exactly=exactly: exactly)
        assert draw(logits, a_row()) == token
