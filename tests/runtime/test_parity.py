"""Token for token what transformers generates: every family, every TP, however the scheduler cuts the work."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import NEW_TOKENS, Reference

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def lone_runner(reference: Reference) -> TorchRunner:
    config = EngineConfig(max_num_seqs=4)
    model = load_model(config, Checkpoint(reference.folder), Solo(), progress=lambda done, total: None)
    return make_runner(config, model, Sizes(num_blocks=64, max_model_len=256))


@pytest.mark.parametrize("chunks", [[57], [1, 20, 36], [40, 1, 16]])
def test_logits_are_those_of_transformers(reference: Reference, chunks: list[int]) -> None:
    """At every position of a prompt, computed at once or in chunks."""
    runner, prompt = lone_runner(reference), reference.prompts[-1]
    assert sum(chunks) == len(prompt)
    rows, start = [], 0
    for step, count in enumerate(chunks, 1):
        admissions = [Admission(0, len(prompt), prompt, 0, SamplingParams())] if start == 0 else []
        blocks = [list(range(10, 20))] if start == 0 else [[]]
        plan = StepPlan(step, admissions, [0], [start], [count], [False], blocks)
        with torch.inference_mode():
            inputs = runner.batch.prepare(plan)
            rows.append(runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention)))
        start += count
    torch.testing.assert_close(torch.cat(rows), reference.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [[56], [3, 0, 56]])
def test_rows_asked_for_are_computed_as_among_all_rows(reference: Reference, rows: list[int]) -> None:
    """What is left out behind the last attention is missed by no other row."""
    runner, prompt = lone_runner(reference), reference.prompts[-1]
    admission = Admission(0, len(prompt), prompt, 0, SamplingParams())
    plan = StepPlan(1, [admission], [0], [0], [len(prompt)], [False], [list(range(10))])
    with torch.inference_mode():
        inputs = runner.batch.prepare(plan)
        hidden = runner.model(inputs.tokens, inputs.positions, inputs.attention, torch.tensor(rows))
        scores = runner.model.scores(hidden)
    torch.testing.assert_close(scores, reference.logits[rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_greedy_tokens_equal_transformers(reference: Reference, tp: int) -> None:
    """One batch under pressure: chunks of prompts, cached prefixes and preemption, then again from a warm cache."""
    tight = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}
    with LLM(reference.folder, tp=tp, progress=False, **tight) as llm:
        cold = llm.generate(reference.prompts, GREEDY)
        assert [generation.token_ids for generation in cold] == reference.continuations
        warm = llm.generate(reference.prompts[-1], GREEDY)
        assert warm.token_ids == reference.continuations[-1]
        assert warm.cached_tokens == 56
        assert all(choice.finish_reason == "length" for choice in cold)


def test_the_batch_above_was_under_pressure(reference: Reference) -> None:
    """The same batch, watched: prompts are cut, the prefix is shared and requests are preempted and recomputed."""
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160}
    with LLM(reference.folder, progress=False, max_num_seqs=6, **limits) as llm:
        requests = [llm.engine.add(prompt, GREEDY) for prompt in reference.prompts]
        chunks = 0
        while llm.engine.has_work:
            llm.engine.step()
            chunks += sum(0 < request.computed < request.prompt_length for request in requests)
        assert chunks > 3
        assert sum(request.preemptions for request in requests) > 0
        assert requests[-1].cached_tokens == 40
        assert [request.output for request in requests] == reference.continuations
        pool = llm.engine.scheduler.pool
        assert pool.available == pool.num_blocks


def test_the_next_step_may_be_launched_before_this_one_is_read(reference: Reference) -> None:
    """Two steps deep, tokens pass from step to step in the device token pool alone, under preemption too."""
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160}
    with LLM(reference.folder, progress=False, max_num_seqs=6, **limits) as llm:
        llm.engine.runner.depth = 2
        answers = llm.generate(reference.prompts, GREEDY)
        assert [answer.token_ids for answer in answers] == reference.continuations


@pytest.mark.parametrize("caching", [True, False])
def test_cached_and_uncached_answers_are_the_same(reference: Reference, caching: bool) -> None:
    with LLM(reference.folder, progress=False, prefix_caching=caching, max_num_seqs=8) as llm:
        for _ in range(2):
            answers = llm.generate(reference.prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == reference.continuations
        assert (answers[-1].cached_tokens > 0) == caching


def test_tenants_with_different_salts_share_nothing(reference: Reference) -> None:
    prompt = reference.prompts[-1]
    with LLM(reference.folder, progress=False) as llm:
        cached = [llm.generate(prompt, GREEDY, salt=salt).cached_tokens for salt in ("a", "b", None, "a", "b", None)]
    assert cached == [0, 0, 0, 48, 48, 48]


@pytest.mark.parametrize("changed", ["norm_eps", "rope", "windows"])
def test_parity_would_notice_a_wrong_constant(reference: Reference, changed: str) -> None:
    """The reference reacts to what it should prove: a slightly wrong model does not pass."""
    runner, prompt = lone_runner(reference), reference.prompts[-1]
    spec = runner.model.place.spec
    if changed == "windows" and not spec.windows:
        pytest.skip("this family has no sliding window")
    wrong = {
        "norm_eps": {"norm_eps": 1e-2},
        "rope": {"rope": dataclasses.replace(spec.rope, theta=spec.rope.theta * 2)},
        "windows": {"windows": ()},
    }[changed]
    checkpoint = Checkpoint(reference.folder)
    checkpoint.spec = dataclasses.replace(spec, **wrong)
    model = load_model(EngineConfig(), checkpoint, Solo(), progress=lambda done, total: None)
    runner = make_runner(EngineConfig(max_num_seqs=4), model, Sizes(num_blocks=64, max_model_len=256))
    plan = StepPlan(
        1, [Admission(0, len(prompt), prompt, 0, SamplingParams())], [0], [0], [len(prompt)], [False], [[*range(10)]]
    )
    with torch.inference_mode():
        inputs = runner.batch.prepare(plan)
        logits = runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention))
    assert (logits - reference.logits).abs().max() > 1e-3
