"""Steps with prompts as CUDA graphs: run with `pytest -m cuda` where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.request import Request
from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.graphs import DecodeGraphs, GraphInParts
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.runtime.runner import TorchRunner
from tests.conftest import NEW_TOKENS, Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}
ROOMY = {"max_model_len": 160, "max_num_seqs": 24, "num_blocks": 400}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
NOISE = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)


def start(captured: Reference, **options: int) -> LLM:
    return LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **options)


@pytest.fixture(params=["graphs", "launches"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every step a graph, or every step with a prompt launched kernel by kernel: the other way is closed."""
    if request.param == "graphs":
        choose = TorchRunner._graphs_for

        def choose_one(runner: TorchRunner, plan: StepPlan) -> DecodeGraphs | PromptGraphs:
            return choose(runner, plan) or pytest.fail("a step was launched kernel by kernel")

        monkeypatch.setattr(TorchRunner, "_graphs_for", choose_one)
    else:
        monkeypatch.setattr("phalanx.runtime.prompt_graphs.PromptGraphs.take", lambda *_: False)
    return str(request.param)


@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_either_way_gives_the_tokens_of_transformers(captured: Reference, way: str, limits: dict[str, int]) -> None:
    """Prompts cut into chunks, cached prefixes and preemption in the tight one, 14 prompts in one step in the other."""
    with start(captured, **limits) as llm:
        answers = llm.generate(captured.prompts * 2, GREEDY)
        again = llm.generate(captured.prompts[-1], GREEDY)
    assert [answer.token_ids for answer in answers] == captured.continuations * 2
    assert again.token_ids == captured.continuations[-1]
    assert again.cached_tokens >= 48


def test_graphs_of_prompts_are_in_parts(captured: Reference) -> None:
    """Those of decodes are not, unless a step has to be read before the next: they are launched ahead."""
    with start(captured, **ROOMY) as llm:
        llm.generate(captured.prompts, GREEDY)
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        assert runner.prompt_graphs is not None
        assert runner.graphs is not None
        prompts = [recorded.graph for _, recorded in runner.prompt_graphs._graphs.values()]
        decodes = [recorded.graph for recorded in runner.graphs._graphs.values()]
    assert prompts
    assert all(isinstance(graph, GraphInParts) and graph._rest for graph in prompts)
    assert all(isinstance(graph, GraphInParts) and not graph._rest for graph in decodes)


def test_prompts_that_come_while_others_decode(captured: Reference, way: str) -> None:
    """One more every three steps; every other one is sampled, and draws the tokens it draws alone."""
    with start(captured, **ROOMY) as llm:
        alone = [answer.token_ids for answer in llm.generate(captured.prompts, NOISE)]
        arriving = [(prompt, params) for prompt in captured.prompts for params in (GREEDY, NOISE)]
        requests: list[Request] = []
        while arriving or llm.engine.has_work:
            if arriving:
                requests.append(llm.engine.add(*arriving.pop()))
            for _ in range(3):
                llm.engine.step()
    found = [request.output for request in reversed(requests)]
    assert found[0::2] == captured.continuations
    assert found[1::2] == alone


def test_a_context_shorter_than_a_tile(captured: Reference, way: str) -> None:
    chosen = (3, 1, 2)
    with start(captured, max_model_len=72, block_size=8, max_num_seqs=4, num_blocks=60) as llm:
        prompts = [captured.prompts[index] for index in chosen]
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [captured.continuations[index][:24] for index in chosen]
