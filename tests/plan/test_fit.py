"""The memory of a rank is a sum that agrees with what engines reported and with arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import ConfigError
from phalanx.models import catalog, read_config
from phalanx.plan.engines import ENGINES, GIB
from phalanx.plan.fit import Fit, activation_bytes, fit
from phalanx.spec import Layout
from phalanx.spec.machine import Machine

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA_8B = dict(catalog.entries()["Llama-3.1-8B"].config)
LLAMA_70B = dict(catalog.entries()["Llama-3.3-70B"].config)
QWEN_30B = dict(catalog.entries()["Qwen3-30B-A3B"].config)
QWEN_06B = dict(catalog.entries()["Qwen3-0.6B"].config)
RANK_OF_FOUR = {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 7168, "vocab_size": 32064}


def one_h200(config: dict[str, Any], **options: Any) -> Fit:
    return fit(read_config(config), Machine.parse("H200"), 1, ENGINES["vllm"], **options)


@pytest.mark.parametrize("batched_tokens", [16384, None], ids=["as-measured", "server-default"])
@pytest.mark.parametrize(
    ("config", "weights_gib", "kv_tokens"),
    [
        (LLAMA_8B, 15.0, 891_392),
        (LLAMA_8B | {"quantization_config": BLOCK_FP8}, 8.55, 944_576),
        (LLAMA_70B | RANK_OF_FOUR | {"head_dim": 128}, 32.89, 1_196_736),
        (QWEN_30B | {"quantization_config": BLOCK_FP8}, 29.06, 1_009_984),
        (QWEN_06B, 1.12, 1_156_592),
    ],
    ids=["8B", "8B-fp8", "70B-rank-of-4", "30B-A3B-fp8", "0.6B"],
)
def test_what_vllm_0_24_reported_on_an_h200(
    config: dict[str, Any], weights_gib: float, kv_tokens: int, batched_tokens: int | None
) -> None:
    found = one_h200(config, batched_tokens=batched_tokens)
    assert found.ranks[0].weight_bytes / GIB == pytest.approx(weights_gib, rel=0.02)
    assert found.kv_tokens == pytest.approx(kv_tokens, rel=0.03)
    assert found.kv_tokens % 16 == 0


def test_a_rank_of_four_is_the_shard_written_as_a_model_of_its_own() -> None:
    shard = one_h200(LLAMA_70B | RANK_OF_FOUR | {"head_dim": 128})
    whole = fit(catalog.model("Llama-3.3-70B"), Machine.parse("4xH200"), 4, ENGINES["vllm"])
    for rank in whole.ranks:
        assert rank.weight_bytes == pytest.approx(shard.ranks[0].weight_bytes, rel=1e-3)
    assert whole.kv_tokens == pytest.approx(shard.kv_tokens, rel=0.01)


def test_the_lines_are_a_sum_and_the_tokens_its_quotient() -> None:
    found = fit(catalog.model("Llama-3.3-70B"), Machine.parse("4xH100-SXM"), 4, ENGINES["vllm"], context=1280)
    rank = found.tightest
    assert sum(line.bytes for line in rank.lines) == rank.kv_bytes
    assert rank.lines[0].bytes == 81_559 * 2**20
    weights = -sum(line.bytes for line in rank.lines if line.what.startswith("weights"))
    assert weights == rank.weight_bytes
    assert found.kv_bytes_per_token == 2 * 80 * 2 * 128 * 2
    assert found.kv_tokens == int(rank.kv_bytes / 81_920) // 16 * 16
    assert found.max_sequences == found.kv_tokens // 1280
    assert found.longest_context == 131_072


def test_collectives_take_memory_where_there_is_more_than_one_rank() -> None:
    spec = catalog.model("Llama-3.1-8B")
    taken = {
        tp: next(line.bytes for line in fit(spec, Machine.parse("2xH100"), tp, ENGINES["vllm"]).tightest.lines[::-1])
        for tp in (1, 2)
    }
    assert taken == {1: -int(0.4 * GIB), 2: -int(0.4 * GIB) - int(0.45 * GIB)}


def test_fp8_kv_holds_twice_the_tokens() -> None:
    bf16, fp8 = (one_h200(LLAMA_8B, kv_format=name) for name in ("bf16", "fp8"))
    assert fp8.kv_tokens == pytest.approx(2 * bf16.kv_tokens, rel=1e-4)


def test_the_longest_context_is_what_the_room_holds() -> None:
    found = fit(catalog.model("Llama-3.3-70B"), Machine.parse("2xH100-SXM"), 2, ENGINES["vllm"])
    assert found.longest_context == int(found.tightest.kv_bytes // (327_680 / 2))
    assert 0 < found.longest_context < 131_072


def test_activations_by_hand() -> None:
    layout = Layout(catalog.model("Llama-3.1-8B"), 1)
    assert activation_bytes(layout, 0, 8192, 32)[0] == 8192 * 2 * (2 * 4096 + 3 * 14336)
    assert activation_bytes(layout, 0, 512, 512)[0] == 512 * 128_256 * 6
    experts = Layout(catalog.model("Qwen3-30B-A3B"), 2)
    assert activation_bytes(experts, 1, 8192, 32)[0] == 8192 * 2 * (2 * 2048 + 3 * 8 * (3 * 384 + 2048))


def test_uneven_shards_are_counted_rank_by_rank() -> None:
    spec = catalog.model("Qwen2.5-72B")
    found = fit(spec, Machine.parse("4xH200"), 4, ENGINES["phalanx"], weight_format="fp8")
    sizes = [rank.weight_bytes for rank in found.ranks]
    columns = [len(shard.ffn) for shard in found.layout.shards]
    assert columns == [58 * 128, 58 * 128, 58 * 128, 57 * 128]
    assert sizes[0] == sizes[1] == sizes[2] > sizes[3]
    blocks_of_one_column_block = 80 * 3 * 8192 // 128
    assert sizes[0] - sizes[3] == blocks_of_one_column_block * (128 * 128 + 4)
    assert sum(sizes) == pytest.approx(spec.weight_bytes("fp8"), rel=1e-3)


def test_mixed_cards_are_bounded_by_the_smallest_and_say_so() -> None:
    spec = catalog.model("Qwen3-8B")
    mixed = fit(spec, Machine.parse("1xRTX5090+1xRTX3090"), 2, ENGINES["vllm"])
    small = fit(spec, Machine.parse("2xRTX3090"), 2, ENGINES["vllm"])
    assert mixed.kv_tokens == small.kv_tokens
    assert mixed.tightest.gpu.name == "RTX3090"
    assert "bounded by the smallest card: 2 x 24.0 GiB (RTX3090)" in mixed.notes[0]
    assert "7.8 GiB of the larger cards stay unused" in mixed.notes[0]


def test_unified_memory_keeps_the_share_of_the_operating_system() -> None:
    found = fit(catalog.model("gpt-oss-120b"), Machine.parse("DGX-Spark"), 1, ENGINES["vllm"])
    memory, kept = found.tightest.lines[:2]
    assert kept.bytes == -int(0.15 * memory.bytes)
    assert "operating system" in kept.what
    used = memory.bytes + kept.bytes
    assert found.tightest.kv_bytes == used + sum(line.bytes for line in found.tightest.lines[2:])
    assert not any("gpu_memory_utilization" in line.how for line in found.tightest.lines)
    assert any("Unified memory" in note for note in found.notes)


def test_a_latent_cache_does_not_shrink_with_tp() -> None:
    spec = catalog.model("DeepSeek-V3")
    eight, sixteen = (fit(spec, Machine.parse("16xH200"), tp, ENGINES["vllm"]) for tp in (8, 16))
    assert eight.kv_bytes_per_token == sixteen.kv_bytes_per_token == 70_272


def test_windows_and_states_count_by_the_length_of_a_sequence() -> None:
    spec, machine = catalog.model("gpt-oss-120b"), Machine.parse("H200")
    found = fit(spec, machine, 1, ENGINES["vllm"], context=10_128)
    assert found.kv_bytes_per_token == (128 * 73_728 + 10_000 * 36_864) / 10_128
    assert found.request_bytes == {"sliding": 128 * 36_864, "full": 10_128 * 36_864}
    qwen = fit(
        catalog.model("Qwen3.5-397B-A17B"),
        Machine.parse("8xH200"),
        8,
        ENGINES["vllm"],
        context=1000,
        weight_format="fp8",
    )
    assert qwen.kv_bytes_per_token == pytest.approx(15_360 + 22.9 * 2**20 / 1000, rel=0.01)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_every_engine_leaves_something_and_none_more_than_the_card(engine: str) -> None:
    found = fit(catalog.model("Llama-3.1-8B"), Machine.parse("H100-SXM"), 1, ENGINES[engine])
    assert 0.55 < found.tightest.kv_bytes / found.tightest.lines[0].bytes < 0.8


def test_the_budgets_of_the_engines_by_hand() -> None:
    spec, machine = catalog.model("Llama-3.1-8B"), Machine.parse("H100-SXM")
    card, weights = machine.gpus[0].memory_bytes, spec.weight_bytes("bf16")
    usable = card - int(0.0043 * card)
    layer, context, graphs = 8192 * 2 * (2 * 4096 + 3 * 14336), int(0.4 * GIB), int(1.1 * GIB)
    expected = {
        "vllm": 0.9 * usable - weights - layer - context,
        "phalanx": usable - 0.01 * card - weights - context - graphs - 104 * 128_256 * 20,  # prompts reported on
        "sglang": usable - (512 + 1.5 * 8192 + 2 * 256 + 128) * 2**20 - weights,
        "trtllm": 0.9 * (usable - weights - layer - context - graphs),
    }
    for name, room in expected.items():
        found = fit(spec, machine, 1, ENGINES[name], sequences=32)
        assert found.tightest.kv_bytes == pytest.approx(room, abs=4), name


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="Use TP <= 2"):
        fit(catalog.model("Llama-3.1-8B"), Machine.parse("2xH100"), 4, ENGINES["vllm"])
