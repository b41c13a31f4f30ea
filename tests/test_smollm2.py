"""The default model, widened, says what transformers makes of the same GGUF file, at one rank and two (uneven) ones."""

from __future__ import annotations

import pytest
import torch

from phalanx import LLM, SamplingParams

pytestmark = pytest.mark.slow

CONTINUED_BY_TRANSFORMERS = {
    "Gravity is": " a fundamental concept in physics that describes the curvature of spacetime caused by the presence "
    "of matter and energy. It's a beautiful example of how our understanding of the universe",
    "def fibonacci(n):\n": (
        "\ndef fibonacci(n):\n    if n <= 1:\n        return n\n    else:\n        return fibonacci(n - 1) + fib"
    ),
    "The history of the Roman Empire begins with the founding of the city of Rome, which, according to legend,": " was "
    "built by Romulus himself. The Roman Empire was a sprawling empire that stretched across Europe, from the Atlantic "
    "to the Mediterranean, and was characterized by its grandeur",
}
"""32 tokens each by transformers 5.22 in float32, greedily, which takes half a minute to read the file. The best token
leads by 0.036 at least."""


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2])
def test_smollm2_equals_transformers(tp: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, min_tokens=32)
    with LLM(tp=tp, dtype="fp32", progress=False, max_num_batched_tokens=24, max_model_len=256) as llm:
        answers = llm.generate(list(CONTINUED_BY_TRANSFORMERS), params)
    assert [answer.text for answer in answers] == list(CONTINUED_BY_TRANSFORMERS.values())


def test_as_stored_it_finds_the_same_texts_as_likely() -> None:
    """With inputs of 8 bits, as its format is meant for; those of a wrong sign or scale would make them a riddle."""
    found = {}
    for dtype in ("fp32", "auto"):
        with LLM(dtype=dtype, progress=False, max_model_len=256) as llm:
            texts = [prompt + text for prompt, text in CONTINUED_BY_TRANSFORMERS.items()]
            answers = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        known = [token for answer in answers for token in answer.prompt_logprobs or () if token is not None]
        found[dtype] = torch.tensor([token.sampled for token in known])
    assert (found["auto"] - found["fp32"]).abs().mean() < 0.15
    assert (found["auto"].mean() - found["fp32"].mean()).abs() < 0.03
