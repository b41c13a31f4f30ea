"""Steps with prompts in graphs: how a plan is padded and laid out, and that padding changes no token.

Graphs need a GPU; what is in them does not. Here every step runs padded, computed anew where a graph would be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.tiling import PROMPT_TILE
from phalanx.models import read_config
from phalanx.runtime.prompt_graphs import DECODES, MOST_PROMPTS, TOKENS, GraphSize, PromptGraphs, lay_out, size_for
from phalanx.runtime.prompt_graphs import longest_step as longest_step_of
from phalanx.runtime.runner import TorchRunner
from tests.conftest import NEW_TOKENS, Reference
from tests.runtime.replays import Repeater
from tests.weights.conftest import COMMON

SPARE = 999
LONGEST = TOKENS[-1]
TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 56, "max_model_len": 160, "max_num_seqs": 6}


def plan_of(rows: list[tuple[int, int, int]]) -> StepPlan:
    """A plan of (start, count, samples), the slots counted down from 500."""
    starts, counts, samples = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    slots = [500 - index for index in range(len(rows))]
    return StepPlan(1, [], slots, starts, counts, samples, [])


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    start, samples = st.integers(0, 5000), st.integers(0, 1)
    decodes = draw(st.lists(st.tuples(start, st.just(1), samples), max_size=70))
    drafts = draw(st.lists(st.integers(2, 9).flatmap(lambda n: st.tuples(start, st.just(n), st.just(n))), max_size=5))
    counts = st.one_of(st.integers(2, 40), st.sampled_from([127, 128, 129, 256]))
    prompts = draw(st.lists(st.tuples(start, counts, samples), min_size=0 if decodes else 1, max_size=MOST_PROMPTS))
    return plan_of(decodes + drafts + prompts)


def singles_of(plan: StepPlan) -> int:
    """Rows of one token, and those of drafts."""
    return sum(count == 1 or wanted > 1 for count, wanted in zip(plan.counts, plan.samples, strict=True))


def size_of(plan: StepPlan, most: int) -> GraphSize | None:
    return size_for(plan, singles_of(plan), most)


def parts_of(plan: StepPlan, size: GraphSize) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor(lay_out(plan, singles_of(plan), size, SPARE)).split(size.parts)]


def rows_of(plan: StepPlan) -> list[tuple[int, int]]:
    """Slot and position of every token, in order."""
    rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
    return [(slot, start + index) for slot, start, count in rows for index in range(count)]


@given(plans())
def test_a_plan_is_laid_out_in_the_smallest_graph_that_holds_it(plan: StepPlan) -> None:
    size = size_of(plan, LONGEST)
    check_size(plan, size)
    if size is not None:
        parts = parts_of(plan, size)
        check_tokens(plan, size, parts)
        check_decodes_and_tiles(plan, size, parts)
        check_yielding_rows(plan, size, parts)


def check_size(plan: StepPlan, size: GraphSize | None) -> None:
    decodes, prompts = sum(plan.counts[: singles_of(plan)]), len(plan.counts) - singles_of(plan)
    fits = [tokens for tokens in TOKENS if plan.num_tokens <= tokens and prompts <= tokens // 8]
    assert (size is None) == (not fits)
    if size is not None:
        assert size.tokens == fits[0]
        assert decodes <= size.decodes <= size.tokens
        assert size.decodes in (*DECODES, size.tokens)


def check_tokens(plan: StepPlan, size: GraphSize, parts: list[list[int]]) -> None:
    """Every token has its row, and the rest is the spare slot's first token."""
    slots, positions, *_ = parts
    padding = size.tokens - plan.num_tokens
    assert list(zip(slots, positions, strict=True)) == rows_of(plan) + [(SPARE, 0)] * padding


def check_decodes_and_tiles(plan: StepPlan, size: GraphSize, parts: list[list[int]]) -> None:
    """Every row is a decode or in one tile, at its own slot and position; rows that fill up look no further than a
    tile. Unused tiles are empty.
    """
    _, _, decode_slots, decode_positions, _, _, numbers = parts
    decodes = sum(plan.counts[: singles_of(plan)])
    padding = size.decodes - decodes
    found = dict(enumerate(rows_of(plan)[:decodes]))
    assert list(zip(decode_slots, decode_positions, strict=True)) == [*found.values(), *[(SPARE, 0)] * padding]
    for slot, first, count, start, _ in zip(*[iter(numbers)] * 5, strict=True):
        assert 0 <= count <= PROMPT_TILE
        assert slot != SPARE or start == 0
        for index in range(count):
            assert first + index not in found
            found[first + index] = (slot, 0 if slot == SPARE else start + index)
    assert [found[row] for row in range(size.tokens)] == rows_of(plan) + [(SPARE, 0)] * (size.tokens - plan.num_tokens)


def check_yielding_rows(plan: StepPlan, size: GraphSize, parts: list[list[int]]) -> None:
    """They are the last of their sequence."""
    _, _, _, _, rows, slots, _ = parts
    ends = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
    wanted = [(slot, start + count - back) for slot, start, count, most in ends for back in range(most, 0, -1)]
    assert [rows_of(plan)[row] for row in rows[: len(wanted)]] == wanted
    assert slots == [slot for slot, _ in wanted] + [SPARE] * (size.samples - len(wanted))
    assert all(row < size.tokens for row in rows)


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        ([(0, LONGEST + 1, 1)], 10 * LONGEST),
        ([(0, 300, 1)], 300),
        ([(0, 2, 1)] * (MOST_PROMPTS + 1), LONGEST),
        ([(9, 1, 1)] * (DECODES[-1] + 1) + [(0, 5, 1)], LONGEST),
    ],
    ids=["tokens", "padded_tokens", "prompts", "decodes"],
)
def test_what_no_graph_holds_is_left_alone(rows: list[tuple[int, int, int]], most: int) -> None:
    assert size_of(plan_of(rows), most) is None


def test_all_rows_may_be_padding() -> None:
    """So a graph is recorded: no slot but the spare one is named."""
    for tokens in TOKENS:
        slots, _, decode_slots, _, rows, sampled_slots, numbers = parts_of(plan_of([]), GraphSize(tokens, 4))
        assert {*slots, *decode_slots, *sampled_slots} == {SPARE}
        assert set(rows) == {0}
        assert sum(numbers[2::5]) == tokens


def test_graphs_go_as_far_as_launching_takes_longer_than_computing() -> None:
    """Some 600 tokens of an 8B model; more where fewer parameters work on a token, or more ranks do."""
    dense = COMMON | {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    spec = read_config(dense)
    small = read_config(dense | {"intermediate_size": 1024})
    assert 512 <= longest_step_of(spec, 1) < 768
    assert longest_step_of(spec, 4) >= 2048
    assert longest_step_of(small, 1) > longest_step_of(spec, 1)


@contextmanager
def padded(captured: Reference, monkeypatch: pytest.MonkeyPatch, **options: object) -> Iterator[LLM]:
    """An engine whose every step runs padded: the plain way is closed."""
    monkeypatch.setattr(TorchRunner, "_forward", lambda *_: pytest.fail("a step was not padded"))
    with LLM(captured.folder, progress=False, **options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        runner.prompt_graphs = PromptGraphs(
            runner.model, runner.batch, Repeater(runner.model.place.group), runner.limits[1]
        )
        yield llm


GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.slow
def test_padded_steps_give_the_tokens_of_transformers(captured: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pressure: prompts cut into chunks, cached prefixes, preemption, decodes beside them."""
    with padded(captured, monkeypatch, **TIGHT) as llm:
        answers = llm.generate(captured.prompts, GREEDY)
        assert [answer.token_ids for answer in answers] == captured.continuations
        llm.generate(captured.prompts[-1], GREEDY)
        again = llm.generate(captured.prompts[-1], GREEDY)
        assert again.cached_tokens == 56
        assert again.token_ids == captured.continuations[-1]


def test_rows_sampled_beside_greedy_ones_get_their_own_tokens(
    captured: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(captured.folder, progress=False, max_num_seqs=16) as llm:
        alone = llm.generate(captured.prompts, noise)
    with padded(captured, monkeypatch, max_num_seqs=16) as llm:
        answers = llm.generate(captured.prompts * 2, [GREEDY, noise] * len(captured.prompts))
    prompts = len(captured.prompts)
    for index, answer in enumerate(answers):
        if index % 2:
            assert answer.token_ids == alone[index % prompts].token_ids
        else:
            assert answer.token_ids == captured.continuations[index % prompts]


def test_a_context_shorter_than_a_tile(captured: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill up are still a whole tile."""
    with padded(captured, monkeypatch, max_model_len=72, block_size=8, max_num_seqs=4) as llm:
        prompts = [captured.prompts[index] for index in (3, 1, 2)]
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [captured.continuations[index][:24] for index in (3, 1, 2)]
