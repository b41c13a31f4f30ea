"""The default model says what transformers makes of the same GGUF file, at one rank and at two (uneven) ones."""

from __future__ import annotations

import pytest

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
    with LLM(tp=tp, progress=False, max_num_batched_tokens=24, max_model_len=256) as llm:
        answers = llm.generate(list(CONTINUED_BY_TRANSFORMERS), params)
    assert [answer.text for answer in answers] == list(CONTINUED_BY_TRANSFORMERS.values())
