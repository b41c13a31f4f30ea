"""Gated delta nets in graphs: rows that fill up touch no state but the spare one, and drafts go as prompts do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.graphs import DecodeGraphs
from phalanx.runtime.prompt_graphs import PromptGraphs, lay_out, size_for
from phalanx.runtime.runner import TorchRunner
from tests.conftest import NEW_TOKENS, Reference
from tests.runtime.replays import Repeater

TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def check_answers(llm: LLM, reference: Reference) -> None:
    """Twice, so that states are also resumed from snapshots."""
    for _ in range(2):
        answers = llm.generate(reference.prompts, GREEDY)
        for prompt, answer in zip(reference.prompts, answers, strict=True):
            assert reference.confirms(prompt, answer.token_ids)


@pytest.mark.slow
def test_padded_steps_give_the_tokens_of_transformers(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU every step, with drafts or without, runs as a graph for prompts would."""
    reference = references("qwen3_5_text")
    monkeypatch.setattr(TorchRunner, "_forward", lambda *_: pytest.fail("a step was not padded"))
    with LLM(reference.folder, progress=False, dtype="fp32", speculate="ngram", **TIGHT) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        group, tokens = runner.model.place.group, runner.limits[1]
        runner.prompt_graphs = PromptGraphs(runner.model, runner.batch, Repeater(group), tokens)
        check_answers(llm, reference)


def test_drafts_that_go_as_prompts_have_room_for_all_their_tokens() -> None:
    """8 sequences with 3 drafts each yield 32 tokens, beside two that yield one."""
    plan = StepPlan(1, [], [*range(10)], [9] * 10, [1, 1] + [4] * 8, [1, 1] + [4] * 8, [])
    size = size_for(plan, singles=2, most_tokens=512)
    assert size is not None
    assert size.samples >= sum(plan.samples)
    assert size.prompts >= 8
    assert len(lay_out(plan, 2, size, spare_slot=99)) == sum(size.parts)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_graphs_on_a_gpu_give_the_tokens_of_transformers(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, family: str, speculate: str
) -> None:
    """Every step is a graph, of decodes or of prompts beside them."""
    reference, choose = references(family), TorchRunner._graphs_for

    def choose_one(runner: TorchRunner, plan: StepPlan) -> DecodeGraphs | PromptGraphs:
        return choose(runner, plan) or pytest.fail("a step was launched kernel by kernel")

    monkeypatch.setattr(TorchRunner, "_graphs_for", choose_one)
    with LLM(reference.folder, progress=False, device="cuda", dtype="fp32", speculate=speculate, **TIGHT) as llm:
        check_answers(llm, reference)
