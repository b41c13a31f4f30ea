"""Masks on a GPU, behind CUDA graphs and two steps deep: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

import pytest
import torch

from phalanx import LLM, SamplingParams
from tests.conftest import NEW_TOKENS, VOCAB, Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Alternating:
    """Even and odd tokens in turn, `length` of them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) >= self.length

    def mask(self) -> bytes:
        return (b"\xaa" if len(self.accepted) % 2 else b"\x55") * (VOCAB // 8)

    def accept(self, token: int) -> None:
        assert token % 2 == len(self.accepted) % 2, f"{token} after {self.accepted}"
        self.accepted.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_masks_hold_on_a_gpu_and_neighbours_do_not_notice(captured: Reference, temperature: float) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    params = SamplingParams(temperature=temperature, max_tokens=100, seed=1, logprobs=2)
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 80, "max_model_len": 160, "max_num_seqs": 16}
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **limits) as llm:
        assert llm.engine.runner.depth == 2
        free = [llm.engine.add(prompt, greedy) for prompt in captured.prompts]
        constrained = [llm.engine.add(prompt, params, matcher=Alternating(21)) for prompt in captured.prompts]
        while llm.engine.has_work:
            llm.engine.step()
    assert [request.output for request in free] == captured.continuations
    for request in constrained:
        assert [token % 2 for token in request.output] == [index % 2 for index in range(21)]
        assert request.finish_reason == "stop"
