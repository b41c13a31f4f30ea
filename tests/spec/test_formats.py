"""Bytes of a weight in every format, and which weights of a checkpoint have it."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import ModelError
from phalanx.models import catalog
from phalanx.models.config import describe
from phalanx.spec import FORMATS, Quantization
from phalanx.spec.schemes import DEFAULTS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", 4 * 300 * 256),
        ("bf16", 2 * 300 * 256),
        ("fp8", 300 * 256 + 3 * 2 * 4),  # 3 x 2 blocks of 128, a float32 each
        ("fp8-channel", 300 * 256 + 300 * 4),
        ("int4", 300 * 128 + 300 * 2 * 2),  # two groups of 128 a row, a bf16 scale each
        ("awq", 300 * 128 + 300 * 2 * 2.5),  # and half a byte of zero point
        ("mxfp4", 300 * 128 + 300 * 8),  # groups of 32, a byte each
        ("nvfp4", 300 * 128 + 300 * 16),  # groups of 16, a byte each
    ],
)
def test_a_matrix_of_300_x_256_by_hand(name: str, expected: float) -> None:
    assert FORMATS[name].bytes(300, 256) == expected


@pytest.mark.parametrize(
    ("told", "name", "unit"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 128),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8-channel", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq", 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq", None),
        ({"quant_method": "mxfp4"}, "mxfp4", 32),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8-channel", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 16),
    ],
)
def test_a_checkpoints_words_name_its_format(told: dict[str, Any], name: str, unit: int | None) -> None:
    spec = describe(LLAMA | {"quantization_config": told})
    assert spec.number_format == name
    assert spec.quantization is not None
    assert spec.quantization.format.unit == unit


@pytest.mark.parametrize(
    ("weights", "name", "unit"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8-channel", None),
        ({"num_bits": 8, "type": "float", "strategy": "block"}, "fp8", 128),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "int4", 32),
        ({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4", 16),
        ({"num_bits": 4, "type": "float", "group_size": 32}, "mxfp4", 32),
    ],
)
def test_compressed_tensors_are_read_by_their_weights(weights: dict[str, Any], name: str, unit: int | None) -> None:
    told = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    spec = describe(LLAMA | {"quantization_config": told})
    assert spec.number_format == name
    assert spec.quantization is not None
    assert spec.quantization.format.unit == unit


@pytest.mark.parametrize("told", [{"quant_method": "bitsandbytes"}, {"quant_method": "gptq", "bits": 3}])
def test_an_unknown_quantization_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refused:
        describe(LLAMA | {"quantization_config": told})
    assert refused.value.code == "unsupported_quantization"
    assert repr(told["quant_method"]) in refused.value.found


@pytest.mark.parametrize(
    ("module", "tensor", "skipped"),
    [
        ("lm_head", "lm_head.weight", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj.weight", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("gate", "model.layers.3.mlp.gate.weight", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj.weight", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.up_proj.weight", False),
        ("*.gate", "model.layers.3.mlp.gate.weight", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate_proj.weight", False),
        ("*.gate", "model.layers.3.mlp.experts.0.gate_proj.weight", False),
        ("*.experts.gate_up_proj", "model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3*", "model.layers.3.mlp.up_proj.weight", True),
        ("mlp.experts.down_proj", "model.layers.3.mlp.experts.down_proj", True),
        ("", "model.layers.3.mlp.up_proj.weight", False),
        (r"re:.*mlp\.(gate|up|down)_proj.*", "model.layers.0.mlp.up_proj.weight", True),
        (r"re:.*mlp\.(gate|up|down)_proj.*", "model.layers.1.mlp.experts.*.up_proj.weight", False),
    ],
)
def test_skipped_modules_are_named_in_four_ways(module: str, tensor: str, skipped: bool) -> None:
    assert Quantization(DEFAULTS["fp8"], (module,)).skips([tensor]) is skipped


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [  # sizes of the published files in 10^9 bytes, without vision tower and multi-token prediction
        ("gpt-oss-120b", 65.2),
        ("gpt-oss-20b", 13.8),
        ("Kimi-K2.5", 594.0),
        ("Qwen/Qwen3-32B-FP8", 34.3),
        ("Qwen/Qwen3-30B-A3B-FP8", 31.2),
        ("MiniMaxAI/MiniMax-M2", 230.0),
    ],
)
def test_a_quantised_checkpoint_weighs_what_its_files_do(name: str, gigabytes: float) -> None:
    spec = catalog.model(name)
    assert spec.weight_bytes(spec.number_format) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_another_format_changes_the_linear_layers_only() -> None:
    spec = describe(LLAMA | {"torch_dtype": "bfloat16"})
    fp8 = spec.in_format("fp8")
    assert (spec.number_format, fp8.number_format) == ("bf16", "fp8")
    assert fp8.in_format("bf16") == spec
    assert spec.in_format("bf16") is spec
    head = spec.tensors["lm_head.weight"]
    assert fp8.tensor_bytes(head, head.shape, "fp8") == 2 * head.elements
