"""Adapters in the files that PEFT writes, and the models that they make of tiny ones, merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    model: Any, folder: Path, rank: int, targets: Sequence[str] = EVERYTHING, alpha: float = 24, **config: Any
) -> Path:
    """A random adapter for all modules of these names."""
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns) / 12
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank) / 12
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given | config))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """W + alpha / r * B A, as PEFT merges."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    changed = copy.deepcopy(model)
    for name in (name for name in tensors if ".lora_A." in name):
        module = changed.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        with torch.no_grad():
            module.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return changed
