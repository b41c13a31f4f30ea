"""No byte of any tensor is owned twice or not at all: every family, at every TP that its heads allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import LayoutError
from phalanx.models.config import describe
from phalanx.models.registry import served
from phalanx.spec import Layout, Tensor
from tests.conftest import FAMILIES, tiny_config

LARGEST = dict.fromkeys(FAMILIES, 8) | {
    "qwen3": 6,
    "mixtral": 4,
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
    "deepseek_v4": 4,
}
"""Of up to 8 ranks: as many as there are query heads, key heads of delta nets, or groups of heads."""
SAME_BY_ANOTHER_NAME = {"gemma3", "kimi_k2", "kimi_k25", "llama4", "qwen3_5", "qwen3_5_moe"}


def owners(layout: Layout, tensor: Tensor) -> list[int]:
    """How many ranks own each element along the axis that is dealt."""
    found = [0] * tensor.shape[tensor.axis]
    for rank in range(layout.tp):
        for axis, (owned, size) in enumerate(zip(layout.slices(tensor, rank), tensor.shape, strict=True)):
            assert 0 <= owned.start <= owned.stop <= size
            if axis != tensor.axis:
                assert (owned.start, owned.stop) == (0, size)
        for element in range(*layout.slices(tensor, rank)[tensor.axis].indices(len(found))):
            found[element] += 1
    return found


def holders(layout: Layout) -> list[int]:
    """How many ranks hold each KV head: those, and no others, that have query heads of it."""
    spec, found = layout.spec, [0] * layout.spec.kv_heads
    for shard in layout.shards:
        assert {head // spec.query_group for head in shard.query_heads} == {*shard.kv_heads}
        for head in shard.kv_heads:
            found[head] += 1
    return found


def check_that_all_is_owned_once(config: dict[str, Any], tp: int) -> None:
    layout = Layout(describe(config), tp)
    held = holders(layout)
    assert layout.spec.latent or tp > layout.spec.kv_heads or set(held) == {1}
    for tensor in layout.spec.stacked_tensors:
        size = tensor.shape[tensor.axis]
        if tensor.split is None:
            wanted = [tp] * size
        elif tensor.split == "kv":
            wanted = [held[element * len(held) // size] for element in range(size)]
        else:
            wanted = [1] * size
        assert owners(layout, tensor) == wanted, tensor.name


def test_every_family_that_is_served_is_here() -> None:
    here = {FAMILIES[name].get("model_type", name) for name in FAMILIES}
    assert here | SAME_BY_ANOTHER_NAME == set(served())


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_own_every_byte_once_and_more_of_them_than_can_are_refused(name: str) -> None:
    config = tiny_config(name).to_dict()
    for tp in range(1, LARGEST[name] + 1):
        check_that_all_is_owned_once(config, tp)
    for tp in range(LARGEST[name] + 1, 9):
        with pytest.raises(LayoutError) as refused:
            Layout(describe(config), tp)
        assert refused.value.fix == f"Use TP <= {LARGEST[name]}."


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    tp=st.integers(1, 8),
    vocab=st.integers(8, 700),
    inner=st.tuples(st.integers(8, 300), st.integers(8, 300), st.integers(8, 300)),
    block=st.sampled_from([None, 8, 16, 32]),
)
def test_whatever_the_sizes(name: str, tp: int, vocab: int, inner: tuple[int, int, int], block: int | None) -> None:
    """Of vocabulary, FFNs and experts, and of blocks that share a scale."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    config = tiny_config(name).to_dict() | {"vocab_size": vocab, "pad_token_id": None}
    config |= {key: size for key, size in zip(names, inner, strict=True) if config.get(key)}
    if block is not None:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    try:
        check_that_all_is_owned_once(config, tp)
    except LayoutError as refused:
        most = int(refused.fix.removeprefix("Use TP <= ").removesuffix("."))
        assert most < tp
        check_that_all_is_owned_once(config, most)
