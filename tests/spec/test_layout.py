"""Layout deals whole units: nothing is lost, nothing is cut, and no rank gets more than a unit too much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import LayoutError
from phalanx.models import read_config
from phalanx.spec import Gqa, Layout, ModelSpec, Tensor
from phalanx.spec.layout import deal

Config = dict[str, Any]

EXPERTS = ("num_experts", "num_experts_per_tok")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen2": (),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias", *EXPERTS, "moe_intermediate_size", "decoder_sparse_step"),
    "mixtral": EXPERTS,
}
"""Which of the drawn fields a family knows."""
BLOCK = 128
DEGREES = range(1, 17)
many = settings(deadline=None, database=None, max_examples=60)


@dataclass(frozen=True)
class Case:
    """A model with the largest TP it can be dealt to."""

    spec: ModelSpec
    most: int

    def layouts(self) -> Iterator[Layout]:
        return (Layout(self.spec, tp) for tp in DEGREES if tp <= self.most)


@st.composite
def cases(draw: st.DrawFn, fp8: bool | None = None) -> Case:
    kv_heads, group = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from((8, 32, 64, 128)))
    quantised = draw(st.booleans()) if fp8 is None else fp8
    size = st.integers(1, 700) | st.integers(1, 40).map(lambda units: 16 * units)
    family = draw(st.sampled_from(sorted(FAMILIES)))
    theirs = {
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": draw(size),
        "decoder_sparse_step": draw(st.sampled_from((1, 2))),
    }
    config = {name: theirs[name] for name in FAMILIES[family]} | {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": draw(st.integers(1, 4)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw(size),
        "vocab_size": draw(size),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]} if quantised else None,
    }
    heads_in_a_block = math.lcm(head_dim, BLOCK) // head_dim if quantised else 1
    most = kv_heads * group if heads_in_a_block == 1 else -(-kv_heads // heads_in_a_block)
    return Case(read_config(config), most)


def distinct(spec: ModelSpec) -> list[Tensor]:
    """One tensor of each kind: layers and experts repeat, and a layout does not look at names."""
    return list({(t.shape, t.split, t.axis, t.is_linear): t for t in spec.tensors.values()}.values())


def owners(layout: Layout, tensor: Tensor) -> np.ndarray:
    """How many ranks own each element."""
    count = np.zeros(tensor.shape, dtype=np.int64)
    for rank in range(layout.tp):
        count[layout.slices(tensor, rank)] += 1
    return count


@many
@given(cases())
def test_every_element_is_owned_once_unless_it_is_replicated(case: Case) -> None:
    for layout in case.layouts():
        for tensor in distinct(case.spec):
            if tensor.split is None:
                assert (owners(layout, tensor) == layout.tp).all()
            elif tensor.split != "kv" or layout.tp <= case.spec.kv_heads:
                assert (owners(layout, tensor) == 1).all()


@many
@given(cases())
def test_kv_heads_are_owned_by_exactly_the_ranks_that_use_them(case: Case) -> None:
    group, head_dim = case.spec.query_group, case.spec.head_dim
    kv_tensors = [tensor for tensor in distinct(case.spec) if tensor.split == "kv"]
    for layout in case.layouts():
        used = np.zeros(case.spec.kv_heads, dtype=np.int64)
        for shard in layout.shards:
            needed = {head // group for head in shard.query_heads}
            assert needed == set(shard.kv_heads)
            used[sorted(needed)] += 1
        assert used.min() >= 1
        assert used.sum() == max(layout.tp, case.spec.kv_heads)
        assert used.max() - used.min() <= 1
        for tensor in kv_tensors:
            rows = owners(layout, tensor).reshape(case.spec.kv_heads, head_dim, -1)
            assert (rows == used[:, None, None]).all()


@many
@given(cases())
def test_shards_laid_side_by_side_in_rank_order_are_the_checkpoint(case: Case) -> None:
    for tensor in distinct(case.spec):
        whole = np.arange(tensor.elements, dtype=np.int64).reshape(tensor.shape)
        for layout in case.layouts():
            parts = [whole[layout.slices(tensor, rank)] for rank in range(layout.tp)]
            assert [part.shape for part in parts] == [layout.shape(tensor, rank) for rank in range(layout.tp)]
            if tensor.split is None:
                assert all(np.array_equal(part, whole) for part in parts)
                continue
            if tensor.split == "kv":
                firsts = {shard.kv_heads: shard.rank for shard in reversed(layout.shards)}
                parts = [parts[rank] for rank in sorted(firsts.values())]
            assert np.array_equal(np.concatenate(parts, axis=tensor.axis), whole)


@many
@given(cases(fp8=True))
def test_no_fp8_block_is_cut(case: Case) -> None:
    for layout in case.layouts():
        for tensor in distinct(case.spec):
            if not tensor.is_linear:
                continue
            for rank in range(layout.tp):
                for part, size in zip(layout.slices(tensor, rank), tensor.shape, strict=True):
                    assert part.start % BLOCK == 0 or part.start == size
                    assert part.stop % BLOCK == 0 or part.stop == size


@many
@given(cases())
def test_every_rank_has_a_query_head_and_the_columns_it_sums_are_the_rows_it_made(case: Case) -> None:
    names = case.spec.tensors
    for layout in case.layouts():
        assert [shard.rank for shard in layout.shards] == list(range(layout.tp))
        for rank in range(layout.tp):
            assert len(layout.shards[rank].query_heads) >= 1
            made = layout.slices(names["model.layers.0.self_attn.q_proj.weight"], rank)[0]
            summed = layout.slices(names["model.layers.0.self_attn.o_proj.weight"], rank)[1]
            assert made == summed
            for down in (t for t in names.values() if t.split in ("ffn", "expert_ffn") and t.axis == 1):
                ups = [t for t in names.values() if t.split == down.split and t.axis == 0]
                assert all(layout.slices(t, rank)[0] == layout.slices(down, rank)[1] for t in ups)


@many
@given(st.integers(0, 500), st.integers(1, 16))
def test_deal_hands_out_whole_units_evenly_and_in_order(units: int, ranks: int) -> None:
    shares = deal(units, ranks)
    assert len(shares) == ranks
    assert [unit for share in shares for unit in share] == list(range(units))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def units(lengths: list[int], unit: int) -> list[int]:
    """Lengths in units, where the last unit of the dimension may be short."""
    return [-(-length // unit) for length in lengths]


@many
@given(cases())
def test_shares_differ_by_at_most_one_unit(case: Case) -> None:
    spec = case.spec
    for layout in case.layouts():
        by_kind: dict[str, list[int]] = {
            kind: [len(getattr(shard, kind)) for shard in layout.shards] for kind in ("ffn", "expert_ffn", "vocab")
        }
        for kind, lengths in by_kind.items():
            size = sum(lengths)
            if spec.quantization and kind != "vocab":
                assert max(units(lengths, BLOCK)) - min(units(lengths, BLOCK)) <= 1
            elif size % 16:
                assert max(lengths) - min(lengths) <= 1
            else:
                assert max(lengths) == -(-size // 16 // layout.tp) * 16
                assert max(lengths) - min(lengths) <= 64
                assert all(length % 16 == 0 for length in lengths)
        if layout.tp <= spec.kv_heads:
            held = units([len(shard.kv_heads) for shard in layout.shards], layout.kv_unit)
            assert max(held) - min(held) <= 1
        else:
            for head in range(spec.kv_heads):
                shares = [len(shard.query_heads) for shard in layout.shards if head in shard.kv_heads]
                assert max(shares) - min(shares) <= 1


def attends(spec: ModelSpec) -> Gqa:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Gqa)
    return mixer


def replicated_elements(spec: ModelSpec) -> int:
    """Norms, routers, and the biases that are added after the sum over ranks."""
    layers, dense = len(spec.layers), len(spec.layers) - len(spec.sparse)
    mixer, widest = attends(spec), next((each.ffn for each in spec.layers if each.ffn.routed is None), None)
    norms = (2 * layers + 1) * spec.hidden + (2 * layers * spec.head_dim if mixer.head_norm else 0)
    routers = (layers - dense) * spec.moe.experts * spec.hidden if spec.moe else 0
    return norms + routers + spec.hidden * (layers * mixer.output_bias + dense * bool(widest and widest.bias))


@many
@given(cases())
def test_ranks_together_hold_the_model_plus_its_replicas(case: Case) -> None:
    spec = case.spec
    kv_head_elements = 2 * len(spec.layers) * spec.head_dim * (spec.hidden + attends(spec).qkv_bias)
    for layout in case.layouts():
        copies = max(layout.tp - spec.kv_heads, 0)
        extra = (layout.tp - 1) * replicated_elements(spec) + copies * kv_head_elements
        for number_format, size in (("fp32", 4), ("bf16", 2)):
            held = sum(layout.weight_bytes(rank, number_format) for rank in range(layout.tp))
            assert held == spec.weight_bytes(number_format) + size * extra
        for number_format in ("fp8", "int4"):
            held = sum(layout.weight_bytes(rank, number_format) for rank in range(layout.tp))
            assert held >= spec.weight_bytes(number_format)
            if number_format == "fp8" and spec.quantization and not copies:
                assert held == spec.weight_bytes(number_format) + 2 * extra


@many
@given(cases())
def test_ranks_together_keep_the_kv_of_a_token_plus_its_replicas(case: Case) -> None:
    for layout in case.layouts():
        kept = sum(layout.kv_bytes_per_token(rank) for rank in range(layout.tp))
        heads = max(layout.tp, case.spec.kv_heads)
        assert kept * case.spec.kv_heads == case.spec.kv_bytes_per_token() * heads


@many
@given(cases(), st.integers(1, 20))
def test_more_ranks_than_there_is_to_deal_are_refused_with_the_way_out(case: Case, more: int) -> None:
    tp = case.most + more
    with pytest.raises(LayoutError) as caught:
        Layout(case.spec, tp)
    assert caught.value.code == "tp_too_large"
    assert f"TP={tp}" in caught.value.found
    assert f" {case.most} " in caught.value.found
    assert caught.value.fix == f"Use TP <= {case.most}."
    assert Layout(case.spec, case.most).tp == case.most


@pytest.mark.parametrize("tp", [0, -1])
def test_no_ranks_are_refused(tp: int, published: dict[str, Config]) -> None:
    with pytest.raises(LayoutError, match=f"TP is {tp}. It must be at least 1.") as caught:
        Layout(read_config(published["Qwen3-32B"]), tp)
    assert caught.value.code == "bad_tp"
