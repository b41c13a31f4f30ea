"""Matrices as the tools of each four-bit format write them, each with its plain dequantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Files = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


class Form(NamedTuple):
    """What config.json says, and how a matrix of this shape is written: its tensors by name, and what they mean."""

    told: dict[str, Any]
    write: Callable[[str, int, int, torch.Generator], tuple[Files, Tensor]]


def codes(*shape: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, 16, shape, generator=random)


def words(nibbles: list[Tensor]) -> Tensor:
    """Eight codes as one word, the first in the lowest bits, by plain arithmetic."""
    total = sum(nibble.long() << 4 * place for place, nibble in enumerate(nibbles))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def scaled(numbers: Tensor, scales: Tensor, group: int) -> Tensor:
    """[rows, columns] numbers, each times the scale of its group, one column after the other."""
    columns = [numbers[:, column].float() * scales[:, column // group].float() for column in range(numbers.shape[1])]
    return torch.stack(columns, 1)


def halves(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()


def awq(group: int) -> Form:
    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        q, z = codes(rows, columns, random=random), codes(rows, columns // group, random=random)
        scales = (torch.rand(rows, columns // group, generator=random) * 0.02 + 0.001).half()
        files = {
            f"{name}.qweight": words([q.t()[:, place::8] for place in AWQ_ORDER]),
            f"{name}.qzeros": words([z.t()[:, place::8] for place in AWQ_ORDER]),
            f"{name}.scales": scales.t(),
        }
        return files, scaled(q - z.repeat_interleave(group, 1), scales, group)

    told = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Form(told | {"modules_to_not_convert": ["o_proj"]}, write)


def gptq(group: int, form: str = "gptq", order: bool = True) -> Form:
    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        q = codes(rows, columns, random=random)
        shift = 1 if form == "gptq" else 0
        z = torch.randint(shift, 15 + shift, (rows, columns // group), generator=random)
        scales = (torch.rand(rows, columns // group, generator=random) * 0.02 + 0.001).half()
        files = {
            f"{name}.qweight": words([q.t()[place::8] for place in range(8)]),
            f"{name}.qzeros": words([(z - shift).t()[:, place::8] for place in range(8)]),
            f"{name}.scales": scales.t(),
        }
        if order:
            files[f"{name}.g_idx"] = (torch.arange(columns) // group).int()
        return files, scaled(q - z.repeat_interleave(group, 1), scales, group)

    told = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "checkpoint_format": form}
    return Form(told | {"dynamic": {r"-:.*\.o_proj": {}}}, write)


def compressed(form: str, **weights: Any) -> Form:
    """By compressed-tensors itself, both ways."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tool = BaseCompressor.get_value_from_registry(form)

    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        group = args.group_size or columns
        values = torch.randn(rows, columns, generator=random) * 0.05
        grouped = values.view(rows, -1, group)
        state = {"weight": values}
        if args.type == "int":
            low, high = grouped.amin(-1), grouped.amax(-1)
            scale = (high - low) / 15 if not args.symmetric else grouped.abs().amax(-1) / 7.5
            state["weight_scale"] = scale.bfloat16().float()
            if not args.symmetric:
                state["weight_zero_point"] = torch.round(-low / scale - 8).clamp(-8, 7).to(torch.int8)
        elif group == 16:
            state["weight_global_scale"] = (448 * 6 / values.abs().max()).reshape(1)
            per_group = grouped.abs().amax(-1) / 6 * state["weight_global_scale"]
            state["weight_scale"] = per_group.to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(grouped.abs().amax(-1) / 6)))
        packed = tool.compress(state, scheme)
        meant = tool.decompress(packed, scheme)["weight"].detach()
        if group == 16:  # theirs is rounded to bf16
            numbers = torch.tensor(E2M1)[halves(packed["weight_packed"])]
            wide = scaled(numbers, packed["weight_scale"].float() / packed["weight_global_scale"], group)
            assert torch.equal(wide.bfloat16(), meant)
            meant = wide
        return {f"{name}.{key}": tensor for key, tensor in packed.items()}, meant

    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}}
    told = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Form(told | {"ignore": [r"re:.*o_proj$"]}, write)


def modelopt_nvfp4() -> Form:
    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        q = codes(rows, columns, random=random)
        scales = (torch.rand(rows, columns // 16, generator=random) * 400 + 1).to(torch.float8_e4m3fn)
        factor = torch.rand((), generator=random) * 1e-4 + 1e-5
        files = {
            f"{name}.weight": (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8),
            f"{name}.weight_scale": scales,
            f"{name}.weight_scale_2": factor,
            f"{name}.input_scale": torch.tensor(1.0),
        }
        return files, scaled(torch.tensor(E2M1)[q], scales.float() * factor, 16)

    return Form({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*.o_proj"]}, write)


def modelopt_fp8() -> Form:
    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        values = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
        scale = torch.rand((), generator=random) + 0.1
        files = {f"{name}.weight": values, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(1.0)}
        return files, values.float() * scale

    return Form({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.o_proj"]}, write)


def fp8_ue8m0() -> Form:
    def write(name: str, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
        values = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
        grid = torch.randint(115, 130, (-(-rows // 128), -(-columns // 128)), generator=random, dtype=torch.uint8)
        files = {f"{name}.weight": values, f"{name}.weight_scale_inv": grid.view(torch.float8_e8m0fnu)}
        wide = torch.exp2(grid.float() - 127).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return files, values.float() * wide

    told = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return Form(told | {"modules_to_not_convert": ["o_proj"]}, write)


def packed_experts(name: str, experts: int, rows: int, columns: int, random: torch.Generator) -> tuple[Files, Tensor]:
    """As gpt-oss has them, and as transformers widens them: [experts, rows, columns]."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
    wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, wide


INT4: Mapping[str, Any] = {"num_bits": 4, "type": "int"}
FORMS: dict[str, Form] = {
    "awq 32": awq(32),
    "awq 64": awq(64),
    "awq 128": awq(128),
    "gptq": gptq(64),
    "gptq v2 without g_idx": gptq(32, "gptq_v2", order=False),
    "w4a16": compressed("pack-quantized", **INT4, strategy="group", group_size=64, symmetric=True),
    "w4a16 with zeros": compressed("pack-quantized", **INT4, strategy="group", group_size=32, symmetric=False),
    "w4a16 by channel": compressed("pack-quantized", **INT4, strategy="channel", symmetric=True),
    "compressed nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    ),
    "compressed mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True
    ),
    "modelopt nvfp4": modelopt_nvfp4(),
    "modelopt fp8": modelopt_fp8(),
    "fp8 ue8m0": fp8_ue8m0(),
}
