"""Five and eight ranks, where heads allow: shares that differ, KV heads that several ranks hold, ranks without FFN."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx import SamplingParams
from phalanx.errors import LayoutError
from tests.conftest import DELTA, FAMILIES, Reference
from tests.threaded_ranks import ThreadedEngine

MANY_KEY_HEADS = DELTA | {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("tp", [5, 8])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "many_key_heads"])
def test_tokens_are_those_of_transformers(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, family: str, tp: int
) -> None:
    """9 query and 3 KV heads, latents, experts of 96 columns with sinks and windows, and a delta net."""
    monkeypatch.setitem(FAMILIES, "many_key_heads", MANY_KEY_HEADS)
    reference = references(family)
    engine = ThreadedEngine(reference.folder, tp)
    answers = engine.generate(reference.prompts[2:4], SHORT)
    engine.close()
    for prompt, answer in zip(reference.prompts[2:4], answers, strict=True):
        assert reference.confirms(prompt, answer.output)


def test_more_ranks_than_heads_are_refused_with_the_largest_number_that_works(
    references: Callable[[str], Reference],
) -> None:
    for family, what, most in (("qwen3", "6 query heads", 6), ("deepseek_v4", "4 groups of 3 query heads", 4)):
        with pytest.raises(LayoutError, match=what) as refused:
            ThreadedEngine(references(family).folder, 8)
        assert refused.value.fix == f"Use TP <= {most}."
