"""Warm on a real GPU: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.fabric.group import Solo
from phalanx.runtime import graphs, memory
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.graphs import GraphBody, Recorded
from phalanx.runtime.rank import load_model
from phalanx.runtime.rehearsal import worst_step
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.warm_up import all_graphs, first_graphs
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import NEW_TOKENS, Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LIMITS = {"max_num_batched_tokens": 64, "block_size": 8, "num_blocks": 200, "max_model_len": 160, "max_num_seqs": 20}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
NOISE = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


def test_a_warm_engine_captures_nothing_in_a_step_and_gives_the_same_tokens(
    captured: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first graphs alone; with all, where later ones share the memory of the first; and without any."""
    recorded: list[GraphBody] = []
    record = graphs.Recorder.__call__

    def noted(recorder: graphs.Recorder, rehearse: GraphBody, run: GraphBody) -> Recorded:
        recorded.append(run)
        return record(recorder, rehearse, run)

    monkeypatch.setattr(graphs.Recorder, "__call__", noted)
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **LIMITS) as llm:
        drawn = [answer.token_ids for answer in llm.generate(captured.prompts, NOISE)]
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", warm_up="quick", **LIMITS) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        for wanted in (len(first_graphs(runner)), len(all_graphs(runner))):
            recorded_before = len(recorded)
            answers = llm.generate(captured.prompts * 2, [GREEDY, NOISE] * len(captured.prompts))
            for index, answer in enumerate(answers):
                prompt = index % len(captured.prompts)
                assert answer.token_ids == (drawn if index % 2 else captured.continuations)[prompt]
            assert len(recorded) == recorded_before
            assert sum(len(each._graphs) for each in (runner.graphs, runner.prompt_graphs) if each) == wanted
            while runner.tend():
                pass


def test_a_graph_s_results_lie_where_it_leaves_them() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16, device="cuda").view(2, 3)
    same = graphs.unowned(tensor)
    assert (same.dtype, same.shape, same.data_ptr()) == (tensor.dtype, tensor.shape, tensor.data_ptr())
    tensor += 1
    assert same.tolist() == tensor.tolist()


@pytest.mark.whole_card
def test_the_cache_leaves_a_worst_step_its_memory_and_no_tenth_of_the_card(captured: Reference) -> None:
    config = EngineConfig(device="cuda", max_num_seqs=32, max_num_batched_tokens=512, max_model_len=300)
    model = load_model(config, Checkpoint(captured.folder), Solo(), lambda done, total: None)
    free, total = torch.cuda.mem_get_info()
    room = memory._room_on_gpu(config, model, 1)
    assert 0.95 * free < room < free - 0.01 * total
    model.allocate_cache(room // model.block_bytes(16), 16)
    runner = TorchRunner(model, 32, 512, 300)
    for graph in all_graphs(runner):
        graph.capture()
    runner.rehearse(worst_step(*runner.limits, model.place.spec.vocab), model)
    torch.cuda.synchronize()
