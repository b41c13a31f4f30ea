"""Steps of single tokens in graphs: batches are padded, those of uneven lengths have graphs of their own.

Graphs need a GPU; what is in them does not. `test_cuda.py` runs real ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.layers.layer import DecoderLayer
from phalanx.runtime import graphs
from phalanx.runtime.batch import News
from phalanx.runtime.graphs import DecodeGraphs, Replayed, graph_sizes
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.sampler import SamplingRows
from tests.conftest import Reference
from tests.runtime.replays import Repeater

LENGTHS = (26, 7, 40, 15, 32, 3, 20)


def test_sizes_end_with_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.mark.slow
@pytest.mark.parametrize("hasty", [False, True])
def test_shrinking_batches_even_and_uneven_get_the_tokens_of_transformers(
    captured: Reference, hasty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond a batch point at the spare slot, whatever was there before."""
    monkeypatch.setattr(graphs, "is_uneven", lambda lengths, kv_heads: max(lengths) > 100)
    greedy = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in LENGTHS]
    paddings = set()
    with LLM(captured.folder, progress=False, max_num_seqs=6, max_model_len=160) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        used = runner.graphs = DecodeGraphs(runner.model, runner.batch, hasty)
        used.recorder = Repeater(runner.model.place.group)
        run = used.run

        def run_and_look(plan: StepPlan, rows: SamplingRows, news: News) -> Replayed:
            results = run(plan, rows, news)
            size = next(size for size in (1, 2, 4, 6) if size >= len(plan.slots))
            padding = [runner.batch.spare_slot] * (size - len(plan.slots))
            slots, positions = used._inbox[:size], used._inbox[size + size % 2 :][:size]
            assert slots.tolist() == plan.slots + padding
            assert positions.tolist() == plan.starts + [0] * len(padding)
            paddings.add(len(padding))
            return results

        monkeypatch.setattr(used, "run", run_and_look)
        answers = llm.generate(captured.prompts, greedy)
    for answer, wanted, length in zip(answers, captured.continuations, LENGTHS, strict=False):
        assert answer.token_ids == wanted[:length]
    assert paddings == {0, 1}
    assert {kind.uneven for kind in used._graphs} == {False, True}


@pytest.mark.parametrize("hasty", [False, True])
def test_graphs_of_a_hasty_host_are_cut_before_most_of_their_layers(
    captured: Reference, hasty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU computes the first ones while the rest is launched."""
    passed: list[int | str] = []
    compute = DecoderLayer.__call__

    def noted(layer: DecoderLayer, *args: Any) -> None:
        passed.append(layer.number)
        compute(layer, *args)

    monkeypatch.setattr(DecoderLayer, "__call__", noted)
    with LLM(captured.folder, progress=False, max_num_seqs=6, max_model_len=160) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        runner.graphs = DecodeGraphs(runner.model, runner.batch, hasty)
        runner.graphs.recorder = Repeater(runner.model.place.group)
        monkeypatch.setattr(runner.graphs.recorder, "cut", lambda: passed.append("cut"))
        (answer,) = llm.generate([captured.prompts[0]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert answer.token_ids == captured.continuations[0][:3]
    whole: list[int | str] = []
    for layer in range(len(runner.model.layers)):
        whole += ["cut", layer] if hasty and layer in (1, 3) else [layer]
    assert passed[-len(whole) :] == whole
    assert ("cut" in passed) == hasty
