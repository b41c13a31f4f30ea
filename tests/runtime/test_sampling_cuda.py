"""Random sampling inside the decode graphs of a GPU: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.runner import TorchRunner
from tests.conftest import Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "block_size": 8, "max_model_len": 160, "max_num_seqs": 24}
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.5, "min_p": 0.1},
]
SLOW: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.9, "top_p": 0.9, "logit_bias": {3: 2.0, 7: -1.0}},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.8, "top_k": 30, "min_tokens": 20, "stop_token_ids": [5]},
]


def params_of(kinds: list[dict[str, Any]], tokens: int = 32) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=100 + index, **kind) for index, kind in enumerate(kinds)
    ]


def answers(captured: Reference, params: list[SamplingParams], device: str = "cuda") -> list[list[int]]:
    prompts = [captured.prompts[index % len(captured.prompts)] for index in range(len(params))]
    with LLM(captured.folder, progress=False, device=device, dtype="fp32", num_blocks=200, **LIMITS) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, params)]


def check_same(found: list[list[int]], wanted: list[list[int]]) -> None:
    """One answer may go another way: of so many random numbers one can fall where a last bit of the scores decides."""
    assert [len(answer) for answer in found] == [len(answer) for answer in wanted]
    assert sum(ours != theirs for ours, theirs in zip(found, wanted, strict=True)) <= 1, (found, wanted)


def test_seeded_tokens_are_those_of_the_cpu(captured: Reference) -> None:
    params = params_of(KINDS + SLOW)
    check_same(answers(captured, params), answers(captured, params, "cpu"))


def test_seeded_tokens_are_the_same_alone_and_in_any_company(captured: Reference) -> None:
    params = params_of(KINDS)
    together, beside = answers(captured, params), answers(captured, params + params_of(SLOW))
    check_same(beside[: len(params)], together)
    prompts = [captured.prompts[index % len(captured.prompts)] for index in range(len(params))]
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", num_blocks=200, **LIMITS) as llm:
        alone = [llm.generate(prompt, one).token_ids for prompt, one in zip(prompts, params, strict=True)]
    check_same(alone, together)


@pytest.mark.parametrize("kinds", [KINDS, KINDS + SLOW], ids=["in the graph", "behind the graph"])
def test_no_step_waits_for_the_gpu(
    captured: Reference, kinds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decodes, once their graphs are captured: torch raises where the host would wait."""
    params, launch = params_of(kinds, tokens=24), TorchRunner.launch

    def strict(runner: TorchRunner, plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(runner, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    prompts = [captured.prompts[index % len(captured.prompts)] for index in range(len(params))]
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", num_blocks=200, **LIMITS) as llm:
        first, _ = ([answer.token_ids for answer in llm.generate(prompts, params)] for _ in range(2))
        monkeypatch.setattr(TorchRunner, "launch", strict)
        check_same([answer.token_ids for answer in llm.generate(prompts, params)], first)
