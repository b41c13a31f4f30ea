"""The same engine on a GPU: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

import pytest
import torch

from phalanx import LLM, SamplingParams
from tests.conftest import NEW_TOKENS, Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not run with -m cuda"),
]

TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}


def test_greedy_tokens_on_a_gpu_equal_transformers(reference: Reference) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(reference.folder, progress=False, device="cuda", dtype="fp32", **TIGHT) as llm:
        answers = llm.generate(reference.prompts, greedy)
    assert [answer.token_ids for answer in answers] == reference.continuations


def test_seeded_sampling_works_on_a_gpu(reference: Reference) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=16, logprobs=2)
    penalties = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0}, max_tokens=8)
    with LLM(reference.folder, progress=False, device="cuda", dtype="fp32", **TIGHT) as llm:
        first, second = (llm.generate(reference.prompts[2], params).token_ids for _ in range(2))
        assert first == second
        assert len(llm.generate(reference.prompts, penalties)) == len(reference.prompts)


def test_many_sequences_of_many_lengths_run_in_padded_graphs(reference: Reference) -> None:
    """Batches between the captured sizes, shrinking as requests end, beside sampled ones: tokens as when alone."""
    lengths = (40, 7, 64, 23, 50, 3, 31)
    greedy = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in lengths]
    noise = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    with LLM(reference.folder, progress=False, device="cuda", dtype="fp32", max_model_len=160, max_num_seqs=24) as llm:
        answers = llm.generate(reference.prompts * 2, greedy + [noise] * len(reference.prompts))
    for answer, wanted, length in zip(answers, reference.continuations, lengths, strict=False):
        assert answer.token_ids == wanted[:length]
