"""A ModelSpec counts and names exactly what transformers builds, and its costs are arithmetic one can do by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from phalanx.models import read_config
from phalanx.spec.ffn import Moe

Config = dict[str, Any]

TINY: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 56,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
EXPERTS: Config = {"num_experts_per_tok": 2}
TINY_FAMILY: dict[str, Config] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
    "mixtral": EXPERTS | {"num_local_experts": 4},
}
TIED: Config = {"tie_word_embeddings": True}
WIDE_HEADS: Config = {"head_dim": 24}
NO_GQA: Config = {"num_key_value_heads": 4}
ONE_KV_HEAD: Config = {"num_key_value_heads": 1}
VARIATIONS: dict[str, list[Config]] = {
    "llama": [
        {},
        TIED,
        WIDE_HEADS,
        ONE_KV_HEAD,
        {"num_key_value_heads": None},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True} | TIED | WIDE_HEADS,
    ],
    "qwen2": [{}, TIED, ONE_KV_HEAD, NO_GQA],
    "qwen3": [{}, TIED, WIDE_HEADS, {"attention_bias": True}, WIDE_HEADS | ONE_KV_HEAD],
    "qwen3_moe": [
        {},
        TIED,
        WIDE_HEADS,
        {"attention_bias": True},
        {"mlp_only_layers": [0, 2]},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 2, "mlp_only_layers": [3]} | TIED,
        {"decoder_sparse_step": 5},
    ],
    "mixtral": [{}, TIED, WIDE_HEADS, NO_GQA],
}
TINY_MODELS = [
    pytest.param({"model_type": family} | TINY | TINY_FAMILY[family] | variation, id=f"{family}-{variation}")
    for family, variations in VARIATIONS.items()
    for variation in variations
]

# One layer, two query heads of 128 on one KV head, an FFN that does not fill its last block of 128.
SMALL: Config = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 300,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
SMALL_EMBEDDING = 1000 * 256
SMALL_NORMS = 3 * 256
SMALL_LINEAR = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 300 * 256


def reference_config(config: Config) -> PreTrainedConfig:
    return AutoConfig.for_model(**config)


def reference_parameters(config: Config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference_config(config))
    return sum(parameter.numel() for parameter in model.parameters())


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the header of a safetensors file: its length in eight bytes, then JSON."""
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("config", TINY_MODELS)
def test_a_tiny_model_holds_what_transformers_builds_and_saves(config: Config, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(reference_config(config))
    model.save_pretrained(tmp_path)

    spec = read_config(config)

    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {tensor.name: tensor.shape for tensor in spec.tensors.values()} == saved_shapes(tmp_path)
    assert list(spec.tensors) == [tensor.name for tensor in spec.tensors.values()]


@pytest.mark.parametrize("config", TINY_MODELS)
def test_the_saved_config_describes_the_same_model(config: Config, tmp_path: Path) -> None:
    reference_config(config).save_pretrained(tmp_path)
    spec, saved = read_config(config), read_config(tmp_path)
    assert saved.tensors == spec.tensors
    assert saved.moe == spec.moe
    assert saved.layers == spec.layers


def test_a_flagship_has_the_parameters_transformers_builds(flagship: str, published: dict[str, Config]) -> None:
    config = published[flagship]
    assert read_config(config).parameters == reference_parameters(config)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Llama-3.3-70B", 70.55, 70.55),
        ("Qwen2.5-72B", 72.71, 72.71),
        ("Qwen3-32B", 32.76, 32.76),
        ("Qwen3-30B-A3B", 30.53, 3.35),
        ("Qwen3-235B-A22B", 235.09, 22.19),
        ("Mixtral-8x7B", 46.70, 12.88),
        ("Mixtral-8x22B", 140.62, 39.15),
    ],
)
def test_total_and_active_parameters_in_billions(
    name: str, total: float, active: float, published: dict[str, Config]
) -> None:
    spec = read_config(published[name])
    assert spec.parameters / 1e9 == pytest.approx(total, abs=0.0051)
    assert spec.active_parameters / 1e9 == pytest.approx(active, abs=0.0051)


def test_a_split_tensor_is_as_long_along_its_axis_as_what_is_split(flagship: str, published: dict[str, Config]) -> None:
    config = published[flagship]
    spec = read_config(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    lengths = {
        "query": config["num_attention_heads"] * head_dim,
        "kv": config["num_key_value_heads"] * head_dim,
        "ffn": config["intermediate_size"],
        "expert_ffn": config.get("moe_intermediate_size", config["intermediate_size"]),
        "vocab": config["vocab_size"],
    }
    for tensor in spec.tensors.values():
        assert tensor.split is None or tensor.shape[tensor.axis] == lengths[tensor.split]
        assert tensor.is_linear or not tensor.expert


def test_only_the_chosen_layers_of_a_mixed_model_are_sparse() -> None:
    config = {"model_type": "qwen3_moe"} | TINY | TINY_FAMILY["qwen3_moe"]
    spec = read_config(config | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [isinstance(layer.ffn, Moe) for layer in spec.layers] == [False, True, False, False]
    assert "model.layers.0.mlp.gate_proj.weight" in spec.tensors
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in spec.tensors


@pytest.mark.parametrize(
    ("number_format", "expected"),
    [
        ("fp32", 4 * (SMALL_LINEAR + 2 * SMALL_EMBEDDING + SMALL_NORMS)),
        ("bf16", 2 * (SMALL_LINEAR + 2 * SMALL_EMBEDDING + SMALL_NORMS)),
        ("fp16", 1_879_552),
        # q, o: 2x2 blocks; k, v: 1x2; gate, up: 3x2; down: 2x3. Four bytes a scale. Embedding, head and norms: bf16.
        ("fp8", SMALL_LINEAR + 4 * (4 + 4 + 2 + 2 + 6 + 6 + 6) + 2 * (2 * SMALL_EMBEDDING + SMALL_NORMS)),
        # A bf16 scale per row and 128 columns: q, o 256x2; k, v 128x2; gate, up 300x2; down 256x3.
        ("int4", SMALL_LINEAR // 2 + 2 * (512 + 512 + 256 + 256 + 600 + 600 + 768) + 1_025_536),
    ],
)
def test_weight_bytes_by_hand(number_format: str, expected: int) -> None:
    assert read_config(SMALL).weight_bytes(number_format) == expected


def test_tied_embeddings_are_stored_once() -> None:
    untied, tied = read_config(SMALL), read_config(SMALL | TIED)
    assert untied.weight_bytes("bf16") - tied.weight_bytes("bf16") == 2 * SMALL_EMBEDDING


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("Llama-3.3-70B", 327_680),
        ("Qwen2.5-72B", 327_680),
        ("Qwen3-32B", 262_144),
        ("Qwen3-30B-A3B", 98_304),
        ("Qwen3-235B-A22B", 192_512),
        ("Mixtral-8x7B", 131_072),
        ("Mixtral-8x22B", 229_376),
    ],
)
def test_kv_bytes_per_token(name: str, bf16: int, published: dict[str, Config]) -> None:
    spec = read_config(published[name])
    assert spec.kv_bytes_per_token() == bf16
    assert spec.kv_bytes_per_token("fp8") == bf16 // 2
    assert spec.kv_bytes_per_token("fp32") == bf16 * 2


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_the_head_but_not_the_look_up(tied: bool) -> None:
    spec = read_config(SMALL | {"tie_word_embeddings": tied})
    products = 2 * (SMALL_LINEAR + SMALL_EMBEDDING + SMALL_NORMS)
    assert spec.flops_per_token() == products == 1_367_552
    assert spec.flops_per_token(context=100) == products + 2 * 2 * 100 * 2 * 128


def test_flops_of_a_moe_count_the_routed_experts_only() -> None:
    moe = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 3}
    spec = read_config(SMALL | moe)
    attention, router, expert = 2 * 256 * 256 + 2 * 128 * 256, 8 * 256, 3 * 300 * 256
    assert spec.active_parameters == attention + router + 3 * expert + 2 * SMALL_EMBEDDING + SMALL_NORMS
    assert spec.flops_per_token() == 2 * (attention + router + 3 * expert + SMALL_EMBEDDING + SMALL_NORMS)


def test_flops_of_attention_stop_growing_at_the_window() -> None:
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
    spec = read_config(SMALL | windows | {"num_hidden_layers": 3})
    grown = spec.flops_per_token(context=100) - spec.flops_per_token()
    assert grown == 4 * (100 + 10 + 10) * 2 * 128
