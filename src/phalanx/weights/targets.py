"""The formats that `quantize` writes: how a matrix is brought to each, and how config.json tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError
from phalanx.kernels.four_bit import Groups, round_int4, round_mxfp4
from phalanx.kernels.fp8 import GROUP, quantise_blocks, quantise_channels
from phalanx.quant.awq import ORDER
from phalanx.spec import ModelSpec, Scheme
from phalanx.spec.schemes import DEFAULTS, MX_BLOCK, WORD, awq, compressed_mxfp4, packed_int4
from phalanx.weights.reader import Pieces

GROUPS = (128, 64, 32)
"""Columns that may share a scale of four-bit weights, the best supported first."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Target:
    """`calibrated`: it goes by what the model's layers are given. `shaped`: the shape is written too."""

    scheme: Scheme
    quantise: Callable[[Tensor], Pieces]
    config: dict[str, Any]
    calibrated: bool = False
    shaped: bool = False


def target_of(name: str, spec: ModelSpec, skipped: list[str]) -> Target:
    if name not in TARGETS:
        raise ConfigError("unknown_format", f"--format is {name!r}.", f"Use {' or '.join(TARGETS)}.")
    return TARGETS[name](spec, skipped)


def _fp8_block(spec: ModelSpec, skipped: list[str]) -> Target:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": skipped,
    }
    return Target(DEFAULTS["fp8"], lambda values: _as_pieces(*quantise_blocks(values)), config)


def _fp8_channel(spec: ModelSpec, skipped: list[str]) -> Target:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    config = _compressed("float-quantized", group, skipped)
    return Target(DEFAULTS["fp8-channel"], lambda values: _as_pieces(*quantise_channels(values)), config)


def _as_pieces(values: Tensor, scales: Tensor) -> Pieces:
    return {"values": values, "scales": scales}


def _compressed(form: str, group: dict[str, Any], skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": skipped,
    }


def _w4a16(spec: ModelSpec, skipped: list[str]) -> Target:
    group, dtype = _group_of(spec, "w4a16"), _DTYPES[spec.dtype]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}

    def quantise(values: Tensor) -> Pieces:
        rounded = round_int4(values, group, False, dtype)
        return {"values": _words(rounded.codes.unflatten(1, (-1, WORD))), "scales": rounded.scales}

    config = _compressed("pack-quantized", {"weights": weights | {"dynamic": False}}, skipped)
    return Target(packed_int4(group, True, spec.dtype), quantise, config, shaped=True)


def _mxfp4(spec: ModelSpec, skipped: list[str]) -> Target:
    _check_columns(spec, "mxfp4", (MX_BLOCK,))
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": MX_BLOCK}

    def quantise(values: Tensor) -> Pieces:
        rounded = round_mxfp4(values)
        pairs = rounded.codes.unflatten(1, (-1, 2))
        return {"values": pairs[..., 0] | (pairs[..., 1] << 4), "scales": rounded.scales}

    scales = {"dynamic": False, "scale_dtype": "torch.uint8"}
    config = _compressed("mxfp4-pack-quantized", {"weights": weights | scales}, skipped)
    return Target(compressed_mxfp4(), quantise, config)


def _awq(spec: ModelSpec, skipped: list[str]) -> Target:
    group = _group_of(spec, "awq")
    narrow = [tensor.name for tensor in spec.stacked_tensors if tensor.is_linear and tensor.shape[0] % WORD]
    if narrow:
        raise CheckpointError(
            "not_quantizable", f"awq packs {WORD} outputs to a word, which do not divide {narrow[0]}.", "Use w4a16."
        )
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": skipped,
    }

    def quantise(values: Tensor) -> Pieces:
        rounded = round_int4(values, group, True, torch.float16)
        return {"values": _outputs(rounded.codes), "scales": rounded.scales, "zeros": _zeros(rounded)}

    return Target(awq(group), quantise, config, calibrated=True)


def _zeros(rounded: Groups) -> Tensor:
    assert rounded.zeros is not None
    return _outputs(rounded.zeros)


def _outputs(codes: Tensor) -> Tensor:
    """[outputs, columns] codes, eight outputs to a word in AWQ's order: [outputs / 8, columns]."""
    return _words(codes.unflatten(0, (-1, WORD))[:, list(ORDER)].movedim(1, -1))


def _words(codes: Tensor) -> Tensor:
    """[..., 8] codes, the first in the lowest bits."""
    shifts = torch.arange(0, 4 * WORD, 4)
    total = (codes.long() << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def _group_of(spec: ModelSpec, name: str) -> int:
    """The first group size that divides the columns of all linear layers."""
    _check_columns(spec, name, GROUPS[-1:])
    columns = {tensor.shape[1] for tensor in spec.stacked_tensors if tensor.is_linear}
    return next(group for group in GROUPS if not any(width % group for width in columns))


def _check_columns(spec: ModelSpec, name: str, groups: tuple[int, ...]) -> None:
    for tensor in spec.stacked_tensors:
        if tensor.is_linear and all(tensor.shape[1] % group for group in groups):
            raise CheckpointError(
                "not_quantizable",
                f"{name} has a scale for each {groups[0]} columns, and {tensor.name} has {tensor.shape[1]}.",
                "Use fp8-channel, which has one for a whole row.",
            )


TARGETS: dict[str, Callable[[ModelSpec, list[str]], Target]] = {
    "fp8-block": _fp8_block,
    "fp8-channel": _fp8_channel,
    "awq": _awq,
    "w4a16": _w4a16,
    "mxfp4": _mxfp4,
}
