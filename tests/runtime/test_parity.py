"""Token for token what transformers generates: every family, every TP, however the scheduler cuts the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx import LLM, SamplingParams
from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.request import Request
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.spec import Compressed, DeltaNet, Gqa, Mla, ModelSpec, Moe
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import LOGIT_NOISE, NEW_TOKENS, SCORE_NOISE, Reference
from tests.threaded_ranks import ThreadedEngine

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 64
WHOLE_ANSWER = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)
SCORED_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=20)
SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=20)
BEYOND_BLOCKS = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
"""As many tokens as fill a block of every kind: of 8 tokens, or of 12 compressed ones."""
CHUNKS = [[57], [1, 20, 36], [40, 1, 16]]


def lone_runner(reference: Reference, num_blocks: int = 64) -> TorchRunner:
    config = EngineConfig(max_num_seqs=4)
    model = load_model(config, Checkpoint(reference.folder), Solo(), progress=lambda done, total: None)
    return make_runner(config, model, Sizes(num_blocks, max_model_len=256))


def window_blocks(runner: TorchRunner, slot: int = 0, first: int = 20) -> list[tuple[int, int, list[int]]]:
    """Blocks of a slot for every group of layers with a window, which nobody else has."""
    groups = len(runner.model.place.spec.window_groups)
    return [(slot, group, list(range(first + 10 * group, first + 10 * (group + 1)))) for group in range(groups)]


def test_logits_are_those_of_transformers(reference: Reference) -> None:
    """At every position of a prompt, computed at once or in chunks."""
    runner, prompt, steps = lone_runner(reference, num_blocks=160), reference.prompts[-1], count(1)
    for slot, chunks in enumerate(CHUNKS):
        assert sum(chunks) == len(prompt)
        rows, start, own = [], 0, 50 * slot
        for tokens in chunks:
            admissions = [Admission(slot, len(prompt), prompt, 0, SamplingParams())] if start == 0 else []
            blocks = [(slot, list(range(own, own + 10)))] if start == 0 else []
            windows = window_blocks(runner, slot, own + 10) if start == 0 else []
            plan = StepPlan(next(steps), admissions, [slot], [start], [tokens], [0], blocks, window_blocks=windows)
            with torch.inference_mode():
                inputs = runner.batch.prepare(plan)
                rows.append(runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention)))
            start += tokens
        torch.testing.assert_close(torch.cat(rows), reference.logits, atol=SCORE_NOISE, rtol=0)


@pytest.mark.parametrize("rows", [[56], [3, 0, 56]])
def test_rows_asked_for_are_computed_as_among_all_rows(some_reference: Reference, rows: list[int]) -> None:
    """What is left out behind the last attention is missed by no other row."""
    runner, prompt = lone_runner(some_reference), some_reference.prompts[-1]
    admission = Admission(0, len(prompt), prompt, 0, SamplingParams())
    windows = window_blocks(runner)
    plan = StepPlan(1, [admission], [0], [0], [len(prompt)], [0], [(0, list(range(10)))], window_blocks=windows)
    with torch.inference_mode():
        inputs = runner.batch.prepare(plan)
        hidden = runner.model(inputs.tokens, inputs.positions, inputs.attention, torch.tensor(rows))
        scores = runner.model.scores(hidden)
    torch.testing.assert_close(scores, some_reference.logits[rows], atol=LOGIT_NOISE, rtol=0)


class Pressed(NamedTuple):
    """One batch under pressure: chunks of prompts, cached prefixes and preemption."""

    engine: ThreadedEngine
    requests: list[Request]
    scores: list[Tensor]
    """What transformers says at every place of each prompt and its answer."""


@pytest.fixture(scope="module")
def pressed(reference: Reference) -> Iterator[Pressed]:
    engine = ThreadedEngine(reference.folder, max_num_seqs=7, num_blocks=64)
    requests = engine.generate(reference.prompts, WHOLE_ANSWER)
    yield Pressed(engine, requests, [reference.scores(request.tokens) for request in requests])
    engine.close()


def test_greedy_tokens_equal_transformers(reference: Reference, pressed: Pressed) -> None:
    """Each token is the likeliest behind those before it: that is the greedy answer. Then again from a warm cache."""
    engine, cold, told = pressed
    assert sum(request.preemptions for request in cold) > 0
    for prompt, request, whole in zip(reference.prompts, cold, told, strict=True):
        scores = whole[len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == request.output
        best, second = scores.topk(2).values.unbind(1)
        assert (best - second).min() > 2 * SCORE_NOISE, "no matter of last bits: choose other PROMPTS"
    for params in (ONE, BEYOND_BLOCKS):
        (again,) = engine.generate(reference.prompts[-1:], params)
    assert again.output == cold[-1].output[: len(again.output)]
    assert again.cached_tokens == 56
    pool = engine.engine.scheduler.pool
    assert pool.available == pool.num_blocks


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_together_give_the_answer_and_scores_of_transformers(
    reference: Reference, pressed: Pressed, tp: int
) -> None:
    """All but the last tokens of the answer are read, in two chunks: where each is the likeliest behind those before it
    these ranks would say it. The last they do say, behind a cached prefix. What the engine does under pressure does not
    depend on its ranks."""
    prompt, answer = reference.prompts[-1], pressed.requests[-1].output
    heard, said = answer[:-2], answer[-2:]
    wanted = pressed.scores[-1][:-1].log_softmax(-1)
    engine = ThreadedEngine(reference.folder, tp, max_num_batched_tokens=75)
    (read,) = engine.generate([prompt + heard], SCORED_PROMPT)
    assert [told.top[0][0] for told in read.prompt_logprobs][-len(heard) :] == heard
    check_scores(read.prompt_logprobs, wanted[:-2])
    (request,) = engine.generate([prompt + heard], SCORED)
    assert request.output == said
    check_scores([output.logprobs for output in engine.outputs[-2:]], wanted[-2:])
    assert request.cached_tokens == 112
    engine.close()


def check_scores(found: Iterable[TokenLogprobs], wanted: Tensor) -> None:
    """Those of the likeliest tokens at every place."""
    tokens, scores = torch.tensor([told.top for told in found], dtype=torch.float64).unbind(-1)
    torch.testing.assert_close(scores.float(), wanted.gather(1, tokens.long()), atol=SCORE_NOISE, rtol=0)


def test_answers_without_a_prefix_cache_and_alone_are_the_same(reference: Reference, pressed: Pressed) -> None:
    engine = ThreadedEngine(reference.folder, prefix_caching=False, max_num_batched_tokens=512, num_blocks=160)
    together = engine.generate(reference.prompts, BEYOND_BLOCKS)
    (alone,) = engine.generate(reference.prompts[4:5], BEYOND_BLOCKS)
    answers = [request.output[:13] for request in pressed.requests]
    assert [request.output for request in (*together, alone)] == [*answers, answers[4]]
    assert [request.cached_tokens for request in (*together, alone)] == [0] * 8
    engine.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("name", "tp"), [("llama3_rope", 2), ("qwen3_moe", 3), ("deepseek_v32", 2)])
def test_processes_give_the_tokens_of_transformers(references: Callable[[str], Reference], name: str, tp: int) -> None:
    """What a rank computes does not depend on where it runs: families and degrees are threads' to try."""
    reference = references(name)
    tight = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}
    with LLM(reference.folder, tp=tp, progress=False, **tight) as llm:
        answers = llm.generate(reference.prompts, BEYOND_BLOCKS)
        for prompt, answer in zip(reference.prompts, answers, strict=True):
            assert reference.confirms(prompt, answer.token_ids)
        assert all(answer.finish_reason == "length" for answer in answers)


def test_the_next_step_may_be_launched_before_this_one_is_read(some_reference: Reference) -> None:
    """Two steps deep, tokens pass from step to step in the device token pool alone: also where prompts are cut, their
    prefix is shared and requests are preempted and recomputed."""
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160}
    with LLM(some_reference.folder, progress=False, max_num_seqs=6, **limits) as llm:
        llm.engine.runner.depth = 2
        requests = [llm.engine.add(prompt, GREEDY) for prompt in some_reference.prompts]
        chunks = 0
        while llm.engine.has_work:
            llm.engine.step()
            chunks += sum(0 < request.computed < request.prompt_length for request in requests)
        assert chunks > 3
        assert sum(request.preemptions for request in requests) > 0
        assert requests[-1].cached_tokens == 40
        pairs = zip(some_reference.prompts, requests, strict=True)
        assert all(some_reference.confirms(prompt, request.output) for prompt, request in pairs)
        pool = llm.engine.scheduler.pool
        assert pool.available == pool.num_blocks


def test_tenants_with_different_salts_share_nothing(some_reference: Reference) -> None:
    prompt = some_reference.prompts[-1]
    with LLM(some_reference.folder, progress=False, max_num_seqs=4) as llm:
        cached = [llm.generate(prompt, ONE, salt=salt).cached_tokens for salt in ("a", "b", None, "a", "b", None)]
    assert cached == [0, 0, 0, 48, 48, 48]


@pytest.mark.parametrize(("prefix_caching", "cached"), [(True, 48), (False, 0)])
def test_a_recurrent_state_is_resumed_where_one_was_kept(
    references: Callable[[str], Reference], prefix_caching: bool, cached: int
) -> None:
    reference = references("qwen3_5_text")
    with LLM(reference.folder, progress=False, prefix_caching=prefix_caching, max_num_seqs=4) as llm:
        answers = [llm.generate(reference.prompts[-1], GREEDY) for _ in range(2)]
    assert all(reference.confirms(reference.prompts[-1], answer.token_ids) for answer in answers)
    assert [answer.cached_tokens for answer in answers] == [0, cached]


def wrong_models(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """The model with one constant off, for every constant it has."""
    yield "norm_eps", dataclasses.replace(spec, norm_eps=1e-2)
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        if getattr(spec, name) != 1.0:
            yield name, dataclasses.replace(spec, **{name: 1.0})
    mixers = [layer.mixer for layer in spec.layers]
    if spec.hyper is not None:
        yield "streams", dataclasses.replace(spec, hyper=dataclasses.replace(spec.hyper, rounds=1))
    for index, mixer in enumerate(mixers):
        if isinstance(mixer, DeltaNet) or mixer in mixers[:index]:
            continue
        assert isinstance(mixer, Gqa | Mla | Compressed)
        wrong = [("scale", dataclasses.replace(mixer, scale=mixer.scale * 1.2))]
        if mixer.rope is not None:
            wrong.append(("theta", dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, theta=77.0))))
        if isinstance(mixer, Gqa | Compressed) and mixer.window is not None:
            wrong.append(("window", dataclasses.replace(mixer, window=mixer.window + 1)))
        if isinstance(mixer, Compressed) and mixer.indexer is not None:
            indexer = dataclasses.replace(mixer.indexer, top_k=mixer.indexer.top_k + 1)
            wrong.append(("top_k", dataclasses.replace(mixer, indexer=indexer)))
        for name, off in wrong:
            layers = list(spec.layers)
            layers[index] = dataclasses.replace(layers[index], mixer=off)
            yield f"{name} of layer {index}", dataclasses.replace(spec, layers=tuple(layers))
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.ffn, Moe):
            router = dataclasses.replace(layer.ffn.router, scaling=1.5, score="sqrt_softplus")
            wrong_ffns = [("router", dataclasses.replace(layer.ffn, router=router))]
            if layer.ffn.activation.limit is not None:
                unbounded = layer.ffn.activation._replace(limit=100.0)
                wrong_ffns.append(("limit", dataclasses.replace(layer.ffn, activation=unbounded)))
            for name, ffn in wrong_ffns:
                layers = [*spec.layers[:index], dataclasses.replace(layer, ffn=ffn), *spec.layers[index + 1 :]]
                yield name, dataclasses.replace(spec, layers=tuple(layers))
            return


def test_parity_would_notice_a_wrong_constant(reference: Reference) -> None:
    """The reference reacts to what it should prove: a slightly wrong model does not pass."""
    prompt = reference.prompts[-1]
    admission = Admission(0, len(prompt), prompt, 0, SamplingParams())
    blocks = [(0, list(range(10)))]
    checkpoint = Checkpoint(reference.folder)
    for name, spec in wrong_models(checkpoint.spec):
        checkpoint.spec = spec
        model = load_model(EngineConfig(), checkpoint, Solo(), progress=lambda done, total: None)
        runner = make_runner(EngineConfig(max_num_seqs=4), model, Sizes(num_blocks=64, max_model_len=256))
        windows = window_blocks(runner)
        plan = StepPlan(1, [admission], [0], [0], [len(prompt)], [0], blocks, window_blocks=windows)
        with torch.inference_mode():
            inputs = runner.batch.prepare(plan)
            logits = runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention))
        assert (logits - reference.logits).abs().max() > 1e-3, name
