"""Tiny checkpoints of every family, as safetensors folders and as GGUF files, made of plain random tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from phalanx.fabric.group import GlooGroup
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.spec import Layout, ModelSpec

Config = dict[str, Any]
Tensors = dict[str, Tensor]

COMMON: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 80,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
CONFIGS: dict[str, Config] = {
    "llama": COMMON | {"model_type": "llama"},
    "llama_tied": COMMON | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True},
    "qwen2": COMMON | {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": COMMON | {"model_type": "qwen3", "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32},
    "qwen3_moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": COMMON
    | {
        "model_type": "mixtral",
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def random_tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in spec.tensors.items()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def save_folder(folder: Path, config: Config, tensors: Mapping[str, Tensor], files: int = 1) -> Path:
    """A Hugging Face checkpoint in one file, or dealt to several with an index."""
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    weight_map = {tensor: names[index % files] for index, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def build(spec: ModelSpec, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """One rank's share, every element not yet loaded being NaN."""
    model = Decoder(Place(Layout(spec, size), GlooGroup(rank, size), dtype, torch.device("cpu")))
    for _, part in model.parts():
        part.fill_(torch.nan)
    return model


ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def write_gguf(
    path: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """The checkpoint as llama.cpp's converter writes it: its names, q and k interleaved for llama, experts fused.

    `kinds` quantises tensors, by their GGUF names; `extra` adds tensors whose bytes are already of their kind.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    kinds = kinds or {}
    for name, values in _gguf_tensors(architecture, config, tensors).items():
        kind = kinds.get(name, Kind.F32)
        plain = kind in (Kind.F32, Kind.F16)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=None if plain else kind)
    for name, raw in (extra or {}).items():
        writer.add_tensor(name, raw, raw_dtype=kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(architecture: str, config: Config, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    named: dict[str, np.ndarray] = {}
    fused: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        values, path = tensor.numpy(), name.split(".")
        if "experts" in path:
            fused.setdefault(f"blk.{path[2]}.ffn_{EXPERTS[path[-2]]}_exps.weight", []).append(values)
            continue
        if architecture == "llama" and path[-2] in heads:
            values = interleave(values, heads[path[-2]])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None
        named[found] = values
    return named | {name: np.stack(parts) for name, parts in fused.items()}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The permutation of llama.cpp's converter: rotary halves become neighbouring pairs."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
