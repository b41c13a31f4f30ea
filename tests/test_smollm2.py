"""The default model equals transformers reading the same GGUF file, at one rank, two (uneven) and three (even)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.weights.checkpoint import locate

pytestmark = pytest.mark.slow

TOKENS = 32
PROMPTS = [
    "Gravity is",
    "def fibonacci(n):\n",
    "The history of the Roman Empire begins with the founding of the city of Rome, which, according to legend,",
]


@pytest.fixture(scope="module")
def continuations() -> list[tuple[list[int], list[int]]]:
    from transformers import AutoModelForCausalLM

    from phalanx.text.tokenizer import Tokenizer

    path = locate(None)
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    pairs = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        batch = torch.tensor([ids])
        out = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        pairs.append((ids, out[0, len(ids) :].tolist()))
    return pairs


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_smollm2_equals_transformers(continuations: list[tuple[list[int], list[int]]], tp: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    with LLM(tp=tp, progress=False, max_num_batched_tokens=24, max_model_len=256) as llm:
        answers = llm.generate([prompt for prompt, _ in continuations], params)
    assert [answer.token_ids for answer in answers] == [tokens for _, tokens in continuations]
