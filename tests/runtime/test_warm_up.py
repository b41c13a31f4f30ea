"""No request waits for a graph: other graphs stand in until theirs is there, and give the same tokens.

Graphs need a GPU; what is in them does not. `test_warm_up_cuda.py` captures real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan, StepResult
from phalanx.runtime import graphs, prompt_graphs
from phalanx.runtime.draft_graphs import DraftGraphs, DraftKind
from phalanx.runtime.executor import Executor
from phalanx.runtime.graphs import GraphKind
from phalanx.runtime.prompt_graphs import TOKENS
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.sampler import SamplingRows
from phalanx.runtime.warm_up import all_graphs, first_graphs
from tests.conftest import NEW_TOKENS, Reference
from tests.heads import HeadReference
from tests.runtime.replays import Repeater

LIMITS = {"max_num_batched_tokens": 40, "block_size": 8, "num_blocks": 80, "max_model_len": 160, "max_num_seqs": 6}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
NOISE = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)


class Captures:
    """Counts what is captured, and how often a step does it."""

    def __init__(self) -> None:
        self.made = 0
        self.in_steps = 0
        self.in_a_step = False


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Graphs on a CPU: they are run anew where they would be replayed."""
    counted = Captures()

    class Counting(Repeater):
        def __call__(self, rehearse: graphs.GraphBody, run: graphs.GraphBody) -> graphs.Recorded:
            counted.made += 1
            counted.in_steps += counted.in_a_step
            return super().__call__(rehearse, run)

    launch = TorchRunner._launch

    def noted(runner: TorchRunner, plan: StepPlan) -> None:
        counted.in_a_step = True
        launch(runner, plan)
        counted.in_a_step = False

    monkeypatch.setattr(graphs, "Recorder", Counting)
    monkeypatch.setattr(graphs.DecodeGraphs, "serve", staticmethod(lambda model: True))
    monkeypatch.setattr(prompt_graphs, "longest_step", lambda spec, ranks: TOKENS[-1])
    monkeypatch.setattr(graphs, "is_uneven", lambda lengths, kv_heads: max(lengths) > 100)
    monkeypatch.setattr(TorchRunner, "_launch", noted)
    return counted


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm.engine.runner
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.mark.parametrize(
    ("captured", "how"),
    [
        ("llama3_rope", "off"),
        ("llama3_rope", "quick"),
        ("qwen2", "quick"),
        ("qwen3_moe", "quick"),
        ("qwen3_moe", "full"),
    ],
    indirect=["captured"],
)
def test_every_way_gives_the_tokens_of_transformers(captured: Reference, how: str, captures: Captures) -> None:
    """With the first graphs alone, with more of them from question to question, and with all."""
    with LLM(captured.folder, progress=False, warm_up=how, **LIMITS) as llm:
        runner = runner_of(llm)
        assert captures.made == {"off": 2, "quick": len(first_graphs(runner)), "full": len(all_graphs(runner))}[how]
        rounds = 2 if how == "quick" else 1
        for _ in range(rounds):
            answers = llm.generate(captured.prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == captured.continuations
            for _ in range(len(all_graphs(runner)) // 2):
                runner.tend()
    assert (captures.in_steps > 0) == (how == "off")


@pytest.mark.parametrize("captured", ["qwen3_moe"], indirect=True)
def test_drawn_tokens_are_the_same_whichever_graph_stands_in(captured: Reference, captures: Captures) -> None:
    wishes = [NOISE, GREEDY] * len(captured.prompts)
    found = []
    for how in ("off", "quick"):
        with LLM(captured.folder, progress=False, warm_up=how, **LIMITS) as llm:
            answers = llm.generate([prompt for prompt in captured.prompts for _ in range(2)], wishes)
            found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["quick", "full"])
def test_no_step_with_drafts_waits_for_a_graph(
    how: str, captures: Captures, heads: Callable[[str], HeadReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random requests, with as many drafts as there may be or fewer, drawn or not. Every kind of graph that a step
    would like best is one of those that a full warm-up captures.
    """
    liked: set[DraftKind] = set()
    find, rng = DraftGraphs._kind_for, random.Random(7)

    def noted(drafts: DraftGraphs, plan: StepPlan) -> DraftKind:
        liked.add(kind := find(drafts, plan))
        return kind

    monkeypatch.setattr(DraftGraphs, "_kind_for", noted)
    limits = LIMITS | {"max_num_seqs": 12, "num_blocks": 160, "speculate": "mtp", "speculate_tokens": 3}
    with LLM(heads("deepseek_v3").folder, progress=False, warm_up=how, **limits) as llm:
        runner, speculation = runner_of(llm), llm.engine.scheduler.speculation
        assert speculation is not None
        assert runner.draft_graphs is not None
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        speculation.ahead = lambda requests: rng.randint(0, speculation.most)  # type: ignore[method-assign]
        speculation.right = lambda drafts, drawn: rng.randint(0, len(drafts))  # type: ignore[method-assign]
        before, all_kinds = captures.made, set(runner.draft_graphs.kinds)
        for requests in (1, 2, 3, 5, 12):
            prompts = [[rng.randint(1, 90) for _ in range(rng.randint(1, 30))] for _ in range(requests)]
            ways = [msgspec.structs.replace(rng.choice([GREEDY, NOISE]), max_tokens=24) for _ in prompts]
            llm.generate(prompts, ways)
        assert speculation.totals.draft_tokens > 100
    assert captures.made == before
    assert liked <= all_kinds
    assert len(liked) > 12
    assert how == "quick" or liked <= set(runner.draft_graphs._graphs)


def test_steps_that_wait_for_a_graph_tell_nothing_of_others(
    captures: Captures, heads: Callable[[str], HeadReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warm-up, until all graphs are there."""
    steady: list[tuple[bool, int]] = []
    collect = TorchRunner.collect

    def noted(runner: TorchRunner) -> StepResult:
        result = collect(runner)
        steady.append((result.times.steady, captures.in_steps))
        return result

    monkeypatch.setattr(TorchRunner, "collect", noted)
    with LLM(
        heads("deepseek_v3").folder, progress=False, warm_up="off", speculate="mtp", speculate_tokens=3, **LIMITS
    ) as llm:
        for _ in range(2):
            llm.generate([[1, 2, 3]] * 3, GREEDY)
    waited = [count > before for (_, before), (_, count) in zip([(True, 0), *steady], steady, strict=False)]
    assert any(waited)
    assert not any(is_steady for (is_steady, _), has_waited in zip(steady, waited, strict=True) if has_waited)
    assert any(is_steady for is_steady, _ in steady)


@pytest.fixture
def quick(tiny_llama: Path, captures: Captures) -> Iterator[TorchRunner]:
    with LLM(tiny_llama, progress=False, warm_up="quick", **LIMITS) as llm:
        yield runner_of(llm)


def test_what_was_put_off_is_done_piece_by_piece_and_then_nothing_is_left(
    quick: TorchRunner, captures: Captures
) -> None:
    left = len(all_graphs(quick)) - captures.made
    assert left > 10
    assert [quick.tend() for _ in range(left)] == [True] * (left - 1) + [False]
    assert captures.made == len(all_graphs(quick))
    assert not quick.tend()
    assert captures.made == len(all_graphs(quick))


def test_the_largest_graphs_come_first(quick: TorchRunner) -> None:
    """The others then find room in their memory."""
    for graphs_of_it in (quick.graphs, quick.prompt_graphs):
        assert graphs_of_it is not None
        first = next(iter(graphs_of_it._graphs))
        assert first.size == max(kind.size for kind in graphs_of_it.kinds)


def test_all_ranks_capture_in_one_order(tiny_llama: Path, captures: Captures, quick: TorchRunner) -> None:
    with LLM(tiny_llama, progress=False, warm_up="quick", **LIMITS) as other:
        runner = runner_of(other)
        assert [graph.kind for graph in all_graphs(runner)] == [graph.kind for graph in all_graphs(quick)]


def plan_of(rows: list[tuple[int, int]]) -> StepPlan:
    starts, counts = ([row[column] for row in rows] for column in (0, 1))
    return StepPlan(1, [], list(range(len(rows))), starts, counts, [1] * len(rows), [])


def test_any_step_that_a_graph_is_meant_for_finds_a_captured_one(quick: TorchRunner) -> None:
    rng, decode, prompts = random.Random(3), quick.graphs, quick.prompt_graphs
    assert decode is not None
    assert prompts is not None
    for _ in range(300):
        drawn = rng.random() < 0.5
        singles = plan_of([(rng.choice((3, 120)), 1)] * rng.randint(1, 6))
        assert decode.take(singles)
        kind = decode._kind_for(singles, SamplingRows(*singles.yielded(), special=[], drawn=drawn))
        stand_in = decode._stand_in(kind)
        assert stand_in in decode._graphs
        assert stand_in is not None
        assert stand_in.size >= len(singles.slots)
        assert stand_in.drawn >= drawn
        mixed = plan_of([(9, 1)] * rng.randint(0, 5) + [(0, rng.randint(2, 30))])
        assert prompts.take(mixed)
        size = prompt_graphs.size_for(mixed, mixed.counts.count(1), TOKENS[-1])
        assert size is not None
        found = prompts._stand_in(prompt_graphs.PromptKind(size, drawn))
        assert found is not None
        assert found.size.tokens >= mixed.num_tokens
        assert found.size.decodes >= mixed.counts.count(1)
        assert found.drawn >= drawn


def test_the_best_stand_in_is_the_one_for_such_lengths_and_then_the_smallest(quick: TorchRunner) -> None:
    decode = quick.graphs
    assert decode is not None
    assert decode._stand_in(GraphKind(1, drawn=False, uneven=False)) == GraphKind(1, drawn=True, uneven=False)
    assert decode._stand_in(GraphKind(4, drawn=False, uneven=True)) == GraphKind(4, drawn=True, uneven=True)
    del decode._graphs[GraphKind(1, drawn=True, uneven=True)]
    assert decode._stand_in(GraphKind(1, drawn=True, uneven=True)) == GraphKind(2, drawn=True, uneven=True)
    decode.capture(GraphKind(4, drawn=False, uneven=True))
    assert decode._stand_in(GraphKind(4, drawn=False, uneven=True)) == GraphKind(4, drawn=False, uneven=True)
    assert decode._stand_in(GraphKind(4, drawn=True, uneven=True)) == GraphKind(4, drawn=True, uneven=True)
    alone = GraphKind(2, drawn=True, uneven=True, apart=True)
    assert decode._stand_in(alone) == GraphKind(2, drawn=True, uneven=True)
    decode.capture(alone)
    assert decode._stand_in(alone) == alone
    assert decode._stand_in(GraphKind(2, drawn=True, uneven=True)) == GraphKind(2, drawn=True, uneven=True)


def test_no_graph_is_larger_than_the_limits_need(quick: TorchRunner) -> None:
    assert quick.prompt_graphs is not None
    sizes = {kind.size for kind in quick.prompt_graphs.kinds}
    assert max(size.tokens for size in sizes) == 64, "40 tokens a step at most"
    assert max(size.decodes for size in sizes) == 16, "6 sequences at most"


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_told_to_do_what_was_put_off(tiny_llama: Path) -> None:
    """An order between plans, in its place among them."""
    done: list[str] = []
    pieces: list[Callable[[], None]] = [lambda: done.append("one"), lambda: done.append("two")]
    with LLM(tiny_llama, tp=2, progress=False) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Executor)
        alone = llm.generate([1, 2, 3], GREEDY).token_ids
        assert not runner.tend()
        runner.runner.put_off.extend(pieces)
        assert runner.tend()
        assert llm.generate([1, 2, 3], GREEDY).token_ids == alone
        assert not runner.tend()
        assert llm.generate([1, 2, 3], GREEDY).token_ids == alone
    assert done == ["one", "two"]
