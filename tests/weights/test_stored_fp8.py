"""FP8 checkpoints: every element times the scale of its tile, whatever part of the matrix a rank holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.fabric.group import GlooGroup
from phalanx.kernels.fp8 import Fp8Weight
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.models import read_config
from phalanx.quant import at_work
from phalanx.spec import Layout, ModelSpec
from phalanx.spec.schemes import DEFAULTS
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import load_weights
from phalanx.weights.reader import SafetensorsReader
from phalanx.weights.views import ViewReader
from tests.weights.conftest import COMMON, Config, Tensors, build, random_tensors, save_folder

BLOCK = 128
QUANTISED: Config = {
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": BLOCK,
    "num_hidden_layers": 1,
}


def compressed(strategy: str) -> Config:
    """As compressed-tensors writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    told = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return {"quantization_config": told | {"config_groups": {"group_0": group}}}


CONFIGS: dict[str, Config] = {
    "five blocks": COMMON | QUANTISED | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 5 * BLOCK},
    "short last blocks": COMMON | QUANTISED | {"model_type": "qwen2", "hidden_size": 200, "intermediate_size": 600},
    "one KV head": COMMON
    | QUANTISED
    | {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 1},
    "half-block heads": COMMON
    | QUANTISED
    | {
        "model_type": "llama",
        "hidden_size": 160,
        "intermediate_size": 300,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "experts": COMMON
    | QUANTISED
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * BLOCK,
    },
    "experts with short last blocks": COMMON
    | QUANTISED
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 144,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 200,
    },
    "compressed blocks": COMMON
    | QUANTISED
    | compressed("block")
    | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 5 * BLOCK},
    "channels": COMMON
    | QUANTISED
    | compressed("channel")
    | {"model_type": "qwen3", "hidden_size": 200, "intermediate_size": 600, "head_dim": 64},
    "experts by channels": COMMON
    | QUANTISED
    | compressed("channel")
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 144,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 200,
    },
}


def quantise(spec: ModelSpec) -> tuple[Tensors, Tensors]:
    """A checkpoint with every linear layer in e4m3 and random scales, and what it means, by a plain loop."""
    stored: Tensors = {}
    meant: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, values in random_tensors(spec).items():
        stored[name] = meant[name] = values
        if spec.tensors[name].is_linear:
            by_channel, told = spec.number_format == "fp8-channel", spec.quantization
            (rows, columns), tall = values.shape, 1 if by_channel else BLOCK
            grid = (rows, 1) if by_channel else (-(-rows // BLOCK), -(-columns // BLOCK))
            scales = torch.rand(grid, generator=generator) + 0.01
            stored[name] = (values * 100).to(torch.float8_e4m3fn)
            assert told is not None
            stored[told.scheme.pieces[1].name(name)] = scales
            meant[name] = dequantise_plainly(stored[name], scales, tall, columns if by_channel else BLOCK)
    return stored, meant


def dequantise_plainly(weight: Tensor, scales: Tensor, tall: int = BLOCK, wide: int = BLOCK) -> Tensor:
    values = weight.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            tile = values[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
            tile *= scales[row, column]
    return values


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_dequantises_its_part_bit_for_bit(tmp_path: Path, name: str, size: int) -> None:
    spec = read_config(CONFIGS[name])
    stored, meant = quantise(spec)
    reader = ViewReader(SafetensorsReader(save_folder(tmp_path, CONFIGS[name], stored)), spec)
    covered = dict.fromkeys(meant, 0)
    for rank in range(size):
        model = build(spec, rank, size)
        load_weights(model, reader, lambda done, total: None)
        for part_name, part in model.parts():
            slices = Layout(spec, size).slices(spec.tensors[part_name], rank)
            assert torch.equal(part, meant[part_name][slices]), part_name
            covered[part_name] += part.numel()
    assert all(covered[part_name] >= values.numel() for part_name, values in meant.items())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_may_keep_its_part_in_fp8(tmp_path: Path, name: str, size: int) -> None:
    """Values and scales as they are stored, also where a projection ends within a tile and the next one follows."""
    spec = read_config(CONFIGS[name])
    stored, meant = quantise(spec)
    reader = ViewReader(SafetensorsReader(save_folder(tmp_path, CONFIGS[name], stored)), spec)
    for rank in range(size):
        layout = Layout(spec, size)
        model = Decoder(Place(layout, GlooGroup(rank, size), torch.float32, torch.device("cpu"), quantised=True))
        load_weights(model, reader, lambda done, total: None)
        for part_name, part in model.parts():
            assert isinstance(part, Fp8Weight) == spec.tensors[part_name].is_linear
            wide = part.dequantised(torch.float32) if isinstance(part, Fp8Weight) else part
            assert torch.equal(wide, meant[part_name][layout.slices(spec.tensors[part_name], rank)]), part_name


@pytest.mark.parametrize("name", ["five blocks", "channels"])
def test_what_is_stored_wider_is_brought_to_fp8(tmp_path: Path, name: str) -> None:
    """Random weights are, and so is a module that the conversion left out."""
    config = CONFIGS[name]
    spec = read_config(config)
    reader = SafetensorsReader(save_folder(tmp_path, config, random_tensors(spec)))
    model = Decoder(Place(Layout(spec, 1), GlooGroup(0, 1), torch.float32, torch.device("cpu"), quantised=True))
    load_weights(model, reader, lambda done, total: None)
    name = "model.layers.0.mlp.down_proj.weight"
    part, wide = dict(model.parts())[name], random_tensors(spec)[name]
    assert isinstance(part, Fp8Weight)
    error = (part.dequantised(torch.float32) - wide).norm() / wide.norm()
    assert 0.01 < error < 0.04


@pytest.mark.parametrize("rows", [(0, 300), (0, 128), (128, 256), (256, 300), (100, 290), (127, 129)])
@pytest.mark.parametrize("columns", [(0, 400), (384, 400), (5, 6), (130, 250)])
def test_a_slice_may_begin_anywhere_in_a_tile(tmp_path: Path, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    weight, scales = torch.randn(300, 400).to(torch.float8_e4m3fn), torch.rand(3, 4) + 0.1
    reader = SafetensorsReader(save_folder(tmp_path, {}, {"w": weight, "w_scale_inv": scales}))
    slices = (slice(*rows), slice(*columns))
    tiles = tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in (rows, columns))
    found = at_work(DEFAULTS["fp8"]).widen({"values": reader.read("w", slices), "scales": scales[tiles]}, slices)
    assert torch.equal(found, dequantise_plainly(weight, scales)[slices])


def test_a_module_that_was_not_converted_is_taken_as_it_is(tmp_path: Path) -> None:
    """Without a scale beside it, a weight in bf16 is what it says."""
    config = CONFIGS["five blocks"]
    spec = read_config(config)
    stored, _ = quantise(spec)
    name = "model.layers.0.self_attn.o_proj.weight"
    del stored[f"{name}_scale_inv"]
    stored[name] = torch.randn(spec.tensors[name].shape).to(torch.bfloat16)
    model = build(spec, 0, 1)
    reader = ViewReader(SafetensorsReader(save_folder(tmp_path, config, stored)), spec)
    load_weights(model, reader, lambda done, total: None)
    assert torch.equal(dict(model.parts())[name], stored[name].float())


@pytest.mark.parametrize("fault", ["no scale", "a row too few"])
def test_a_weight_without_its_scales_is_refused(tmp_path: Path, fault: str) -> None:
    """An e4m3 weight means nothing without its scales."""
    config = CONFIGS["five blocks"]
    stored, _ = quantise(read_config(config))
    scales = "model.layers.0.mlp.down_proj.weight_scale_inv"
    grid = stored.pop(scales)
    if fault != "no scale":
        stored[scales] = grid[:-1].clone()
    checkpoint = Checkpoint(save_folder(tmp_path, config, stored))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv"):
        load_weights(
            build(checkpoint.spec, 0, 1), checkpoint.open_reader(torch.device("cpu")), lambda done, total: None
        )
