"""Log-probabilities of prompts are those of transformers, however the prompt is cut, cached or computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx import LLM, SamplingParams
from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs
from phalanx.engine.output import NO_TOKEN
from phalanx.errors import RequestError
from phalanx.runtime import reports
from phalanx.spec import step_memory
from tests.conftest import LOGIT_NOISE, Reference
from tests.public_domain import ITEMS, OF_ITEMS, OF_PASSAGES, PASSAGES
from tests.threaded_ranks import ThreadedEngine

PROMPT_ALONE = SamplingParams(max_tokens=0, prompt_logprobs=3)


def confirm(found: PromptLogprobs, prompt: list[int], logits: Tensor) -> None:
    """By transformers' own scores. Where two tokens are nearly as likely, either may be the better one."""
    expected = torch.log_softmax(logits[:-1].float(), -1)
    assert (found.start, len(found)) == (1, len(prompt) - 1)
    for token, told, scores in zip(prompt[1:], found, expected, strict=True):
        assert told.sampled == pytest.approx(float(scores[token]), abs=2 * LOGIT_NOISE)
        assert told.rank - 1 in range(
            int((scores > scores[token] + LOGIT_NOISE).sum()), int((scores > scores[token] - LOGIT_NOISE).sum()) + 1
        )
        values = [value for _, value in told.top]
        torch.testing.assert_close(torch.tensor(values), scores.topk(len(values)).values, atol=2 * LOGIT_NOISE, rtol=0)
        assert all(abs(float(scores[each]) - value) <= 2 * LOGIT_NOISE for each, value in told.top)


@pytest.mark.parametrize("tp", [1, 3])
def test_a_prompt_is_scored_as_transformers_does(references: Callable[[str], Reference], tp: int) -> None:
    """Prompts longer than a step, several in one, and once more when all of them are in the cache."""
    reference = references("llama")
    engine = ThreadedEngine(reference.folder, tp=tp, num_blocks=64)
    for _ in range(2):
        requests = engine.generate(reference.prompts, PROMPT_ALONE)
        for prompt, request in zip(reference.prompts, requests, strict=True):
            confirm(request.prompt_logprobs, prompt, reference.scores(prompt))
            assert request.cached_tokens == 0
    assert {output.token for output in engine.outputs} == {NO_TOKEN}
    assert {output.finish_reason for output in engine.outputs} == {"length"}
    engine.close()


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v32", "qwen3_5_text", "deepseek_v4"])
def test_windows_latents_states_and_streams_tell_of_their_prompt(
    references: Callable[[str], Reference], family: str
) -> None:
    reference = references(family)
    engine, prompt = ThreadedEngine(reference.folder, num_blocks=64), reference.prompts[-1]
    (request,) = engine.generate([prompt], PROMPT_ALONE)
    confirm(request.prompt_logprobs, prompt, reference.logits)
    engine.close()


def test_who_is_computed_again_is_told_once(references: Callable[[str], Reference]) -> None:
    """Preempted by others, with answers that go on: each prompt is scored, and each answer is as it is without."""
    reference = references("llama")
    engine = ThreadedEngine(reference.folder, max_num_seqs=7, num_blocks=40)
    asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    requests = engine.generate(reference.prompts, asked)
    assert sum(request.preemptions for request in requests) > 0
    for prompt, request in zip(reference.prompts, requests, strict=True):
        confirm(request.prompt_logprobs, prompt, reference.scores(prompt))
        assert reference.confirms(prompt, request.output)
    told = [output.request_id for output in engine.outputs if output.prompt_logprobs is not None]
    assert sorted(told) == sorted(request.id for request in requests)
    engine.close()


def test_a_part_that_is_known_is_left_out() -> None:
    def part(start: int, *values: float) -> PromptLogprobs:
        numbers = torch.tensor(values)
        return PromptLogprobs(start, 1, numbers.numpy().tobytes(), numbers.int().numpy().tobytes())

    whole = part(1).extended(part(1, 1.0, 2.0, 3.0)).extended(part(2, 2.0, 3.0, 4.0))
    assert list(whole) == [TokenLogprobs(number, [], int(number)) for number in (1.0, 2.0, 3.0, 4.0)]
    with pytest.raises(AssertionError):
        whole.extended(part(6, 6.0))


def test_scores_are_held_a_slice_at_a_time(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the prompt."""
    vocab, rows = 512, 8
    sizes: list[int] = []

    def seen(scores: Tensor, tokens: Tensor, likeliest: int) -> tuple[Tensor, ...]:
        sizes.append(len(scores))
        return told(scores, tokens, likeliest)

    told = reports._told
    monkeypatch.setattr(reports, "_told", seen)
    monkeypatch.setattr(step_memory, "MOST_REPORTED_BYTES", rows * vocab * step_memory.REPORTED_SCORE_BYTES)
    engine = ThreadedEngine(tiny_llama, max_num_batched_tokens=160)
    prompt = [index * 7 % vocab for index in range(150)]
    (request,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert sizes == [rows] * 18 + [5]
    assert len(request.prompt_logprobs) == 149
    engine.close()


@pytest.mark.slow
def test_the_default_model_scores_public_texts_as_transformers_does() -> None:
    choices = [(item.context, choice) for item in ITEMS for choice in item.choices]
    with LLM(dtype="fp32", progress=False, max_model_len=256, max_num_batched_tokens=256, num_blocks=64) as llm:
        assert llm.tokenizer is not None
        told = llm.generate([*PASSAGES, *map("".join, choices)], SamplingParams(max_tokens=0, prompt_logprobs=0))
        firsts = [1] * len(PASSAGES) + [len(llm.tokenizer.encode(context)) for context, _ in choices]
    sums = [
        sum(each.sampled for each in generation.prompt_logprobs[first:] if each)
        for generation, first in zip(told, firsts, strict=True)
        if generation.prompt_logprobs
    ]
    assert sums == pytest.approx(
        [*OF_PASSAGES, *(value for values in OF_ITEMS for value in values)], rel=2e-5, abs=1e-3
    )
    assert {(each.text, len(each.token_ids), each.finish_reason) for each in told} == {("", 0, "length")}


def test_a_prompt_may_fill_the_context_if_nothing_is_to_follow(tiny_llama: Path) -> None:
    with LLM(tiny_llama, progress=False, max_model_len=33, num_blocks=8, max_num_batched_tokens=32) as llm:
        told = llm.generate(list(range(33)), PROMPT_ALONE)
        assert told.prompt_logprobs is not None
        assert len(told.prompt_logprobs) == 33
        with pytest.raises(RequestError, match="33 tokens"):
            llm.generate(list(range(33)), SamplingParams(max_tokens=1))
