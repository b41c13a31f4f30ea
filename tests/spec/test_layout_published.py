"""The layouts of published models, number by number."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import LayoutError
from phalanx.models import read_config
from phalanx.spec import Layout

Config = dict[str, Any]
Published = dict[str, Config]


def blocks(ranges: list[range]) -> list[int]:
    return [len(owned) // 128 for owned in ranges]


def test_nine_query_heads_on_three_kv_heads_go_to_two_ranks_as_two_groups_and_one(published: Published) -> None:
    first, second = Layout(read_config(published["SmolLM2-135M"]), 2).shards
    assert (first.query_heads, first.kv_heads) == (range(0, 6), range(0, 2))
    assert (second.query_heads, second.kv_heads) == (range(6, 9), range(2, 3))


@pytest.mark.parametrize(
    ("tp", "expected"),
    [(2, [116, 115]), (4, [58, 58, 58, 57]), (8, [29] * 7 + [28]), (16, [15] * 7 + [14] * 9)],
)
def test_qwen2_5_72b_in_block_fp8(tp: int, expected: list[int], published: Published, block_fp8: Config) -> None:
    spec = read_config(published["Qwen2.5-72B"] | {"quantization_config": block_fp8})
    layout = Layout(spec, tp)
    assert sum(expected) == 231
    assert blocks([shard.ffn for shard in layout.shards]) == expected
    down = spec.tensors["model.layers.0.mlp.down_proj.weight"]
    assert [layout.shape(down, rank) for rank in range(tp)] == [(8192, 128 * share) for share in expected]


def test_six_blocks_of_an_expert_on_eight_ranks_leave_two_without(published: Published, block_fp8: Config) -> None:
    spec = read_config(published["Qwen3-30B-A3B"] | {"quantization_config": block_fp8})
    layout = Layout(spec, 8)
    assert blocks([shard.expert_ffn for shard in layout.shards]) == [1] * 6 + [0] * 2
    gate = spec.tensors["model.layers.0.mlp.experts.0.gate_proj.weight"]
    assert layout.shape(gate, 5) == (128, 2048)
    assert layout.shape(gate, 7) == (0, 2048)
    assert [len(shard.query_heads) for shard in layout.shards] == [4] * 8


def test_experts_without_blocks_are_dealt_to_all_ranks(published: Published) -> None:
    layout = Layout(read_config(published["Qwen3-30B-A3B"]), 8)
    assert [len(shard.expert_ffn) for shard in layout.shards] == [96] * 8


def test_eight_kv_heads_on_sixteen_ranks_are_held_twice(published: Published) -> None:
    layout = Layout(read_config(published["Llama-3.3-70B"]), 16)
    assert [shard.kv_heads for shard in layout.shards] == [range(rank // 2, rank // 2 + 1) for rank in range(16)]
    assert [shard.query_heads for shard in layout.shards] == [range(4 * rank, 4 * rank + 4) for rank in range(16)]


@pytest.mark.parametrize(
    ("name", "tp", "query", "kv", "inner"),
    [
        ("Llama-3.3-70B", 8, 1024, 128, 3584),
        ("Llama-3.3-70B", 16, 512, 128, 1792),
        ("Qwen2.5-72B", 8, 1024, 128, 3696),
        ("Qwen3-32B", 4, 2048, 256, 6400),
        ("Qwen3-30B-A3B", 4, 1024, 128, 192),
        ("Qwen3-235B-A22B", 8, 1024, 128, 192),
        ("Mixtral-8x7B", 8, 512, 128, 1792),
        ("Mixtral-8x22B", 16, 384, 128, 1024),
    ],
)
def test_where_everything_divides_all_ranks_have_the_same(
    name: str, tp: int, query: int, kv: int, inner: int, published: Published
) -> None:
    spec = read_config(published[name])
    layout = Layout(spec, tp)
    for rank in range(tp):
        owned = [len(layout.owned(kind, rank)) for kind in ("query", "kv", "expert_ffn" if spec.moe else "ffn")]
        assert owned == [query, kv, inner]


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("Llama-3.3-70B", 40_960),
        ("Qwen2.5-72B", 40_960),
        ("Qwen3-32B", 32_768),
        ("Qwen3-30B-A3B", 24_576),
        ("Qwen3-235B-A22B", 48_128),
        ("Mixtral-8x7B", 16_384),
        ("Mixtral-8x22B", 28_672),
    ],
)
def test_kv_bytes_a_rank_keeps_of_a_token_at_tp_8(name: str, bf16: int, published: Published) -> None:
    layout = Layout(read_config(published[name]), 8)
    assert [layout.kv_bytes_per_token(rank) for rank in range(8)] == [bf16] * 8
    assert layout.kv_bytes_per_token(0, "fp8") == bf16 // 2


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "block-fp8"])
@pytest.mark.parametrize("tp", range(1, 17))
def test_every_flagship_lays_out_on_one_to_sixteen_ranks(
    flagship: str, tp: int, quantised: bool, published: Published, block_fp8: Config
) -> None:
    config = published[flagship] | ({"quantization_config": block_fp8} if quantised else {})
    spec = read_config(config)
    layout = Layout(spec, tp)
    whole = {"query_heads": spec.heads, "ffn": spec.intermediate, "vocab": spec.vocab}
    whole |= {"expert_ffn": spec.moe.intermediate if spec.moe else 0}
    for kind, size in whole.items():
        shares: list[range] = [getattr(shard, kind) for shard in layout.shards]
        assert [shares[0].start, *(share.stop for share in shares)] == [*(share.start for share in shares), size]
    assert {head for shard in layout.shards for head in shard.kv_heads} == set(range(spec.kv_heads))


def test_one_rank_holds_the_whole_model(published: Published) -> None:
    spec = read_config(published["Llama-3.1-8B"])
    for number_format in ("fp32", "bf16", "fp8", "int4"):
        assert Layout(spec, 1).weight_bytes(0, number_format) == spec.weight_bytes(number_format)


def test_more_ranks_than_query_heads_are_refused(published: Published) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(read_config(published["SmolLM2-135M"]), 10)
    assert caught.value.code == "tp_too_large"
    assert str(caught.value) == "TP=10, but the model has 9 query heads to deal. Use TP <= 9."


def test_heads_that_fill_a_block_only_together_are_dealt_together(published: Published, block_fp8: Config) -> None:
    spec = read_config(published["SmolLM2-135M"] | {"quantization_config": block_fp8})
    assert [shard.kv_heads for shard in Layout(spec, 2).shards] == [range(0, 2), range(2, 3)]
    with pytest.raises(LayoutError) as caught:
        Layout(spec, 3)
    assert "TP=3" in caught.value.found
    assert "2 groups of 2 KV heads (head_dim 64" in caught.value.found
    assert caught.value.fix == "Use TP <= 2."
