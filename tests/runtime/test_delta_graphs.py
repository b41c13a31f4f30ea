"""Gated delta nets in graphs: rows that fill up touch no state, and drafts are rows of one token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import StepPlan
from phalanx.runtime import graphs as graphs_module
from phalanx.runtime.batch import News
from phalanx.runtime.graphs import DecodeGraphs, Replayed
from phalanx.runtime.prompt_graphs import PromptGraphs, lay_out, size_for
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.sampler import SamplingRows
from tests.conftest import NEW_TOKENS, Reference
from tests.drafts import Rememberer
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


ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


@pytest.mark.parametrize("room", [1, 24])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_rows_of_drafts_run_in_graphs_of_decodes(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, device: str, room: int
) -> None:
    """With drafts that come true and such that do not; and with room in graphs for what is new, and without. On a CPU
    graphs run anew where they would be replayed.
    """
    monkeypatch.setattr(graphs_module._Inbox, "room", room)
    reference, run = references("qwen3_5_text"), DecodeGraphs.run
    plans: list[StepPlan] = []
    apart: dict[bool, set[bool]] = {True: set(), False: set()}

    def noted(graphs: DecodeGraphs, plan: StepPlan, rows: SamplingRows, news: News) -> Replayed:
        plans.append(plan)
        apart[max(plan.counts) == 1].add(graphs._kind_for(plan, rows).apart)
        return run(graphs, plan, rows, news)

    monkeypatch.setattr(DecodeGraphs, "run", noted)
    options = {"device": device, "dtype": "fp32", "speculate": "ngram", **TIGHT}
    with LLM(reference.folder, progress=False, **options) as llm:
        runner, scheduler = llm.engine.runner, llm.engine.scheduler
        assert isinstance(runner, TorchRunner)
        scheduler.speculation = None
        plain = [answer.token_ids for answer in llm.generate(reference.prompts, GREEDY)]
        known = {tuple(prompt): tokens for prompt, tokens in zip(reference.prompts, plain, strict=True)}
        scheduler.speculation = speculation = Speculation(Rememberer(known, 0.7), 3)
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        if device == "cpu":
            runner.graphs = DecodeGraphs(runner.model, runner.batch, hasty=True)
            runner.graphs.recorder = Repeater(runner.model.place.group)
        plans.clear()
        check_answers(llm, reference)
    assert 0 < speculation.totals.accepted_tokens < speculation.totals.draft_tokens
    assert apart == {True: {True}, False: {False}}, "graphs that take rows apart are for steps without drafts"
    assert sum(samples > 1 for plan in plans for samples in plan.samples) > 0.5 * speculation.totals.drafts
    assert max(count for plan in plans for count in plan.counts) == 4


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
