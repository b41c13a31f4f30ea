"""A tiny DeepSeek V4 with the names and in the formats of the hub."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.models import read_config
from phalanx.models.deepseek_v4 import _HUB
from tests.weights.conftest import Config, Tensors, random_tensors
from tests.weights.four_bit_files import E2M1, codes, scaled

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128],
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "dtype": "float32",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def hub_name(name: str) -> str:
    for ours, theirs in _HUB:
        name = name.replace(ours, theirs)
    return name


def published() -> tuple[Config, Tensors, Tensors]:
    spec, random = read_config(CONFIG), torch.Generator().manual_seed(4)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, values in random_tensors(spec).items():
        tensor, theirs = spec.tensors[name], hub_name(name)
        if not tensor.is_linear or ".compressor." in name:
            stored[theirs] = meant[name] = values
            continue
        scales = theirs.removesuffix("weight") + "scale"
        write = _fp4 if tensor.expert else _fp8
        stored[theirs], stored[scales], meant[name] = write(*tensor.shape, random)
    return CONFIG, stored, meant


def _fp4(rows: int, columns: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = codes(rows, columns, random=random)
    exponents = torch.randint(110, 130, (rows, columns // 32), generator=random, dtype=torch.uint8)
    packed = (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    meant = scaled(torch.tensor(E2M1)[q], torch.exp2(exponents.float() - 127), 32)
    return packed, exponents.view(torch.float8_e8m0fnu), meant


def _fp8(rows: int, columns: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    grid = torch.randint(115, 130, (-(-rows // 128), -(-columns // 128)), generator=random, dtype=torch.uint8)
    wide = torch.exp2(grid.float() - 127).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values, grid.view(torch.float8_e8m0fnu), values.float() * wide
