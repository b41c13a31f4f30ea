"""How a `config.json` tells of quantised weights, in whichever of the field's dialects."""

from __future__ import annotations

import dataclasses

from phalanx.errors import ModelError
from phalanx.models.fields import Config
from phalanx.spec.formats import FORMATS, NumberFormat, Quantization


def quantization(config: Config) -> Quantization | None:
    """The number format of the linear layers, in whichever of the field's dialects it is told."""
    told = config.get("quantization_config")
    if not told:
        return None
    number_format = _told_format(told)
    if number_format is None:
        raise ModelError(
            "unsupported_quantization",
            f"The checkpoint is quantised as {told.get('quant_method')!r} "
            f"({told.get('format') or told.get('bits') or 'no further format'}).",
            f"Known formats: {', '.join(FORMATS)}.",
        )
    skipped = next((told[key] for key in _SKIP_KEYS if told.get(key)), ())
    scales = "_scale_inv" if told.get("quant_method") == "fp8" else "_scale"
    return Quantization(number_format, tuple(skipped), scales)


_SKIP_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _told_format(told: Config) -> NumberFormat | None:
    method, block = told.get("quant_method"), told.get("weight_block_size") or (0, 1)
    if method == "fp8":
        return _tiled("fp8", *block) if block[0] == block[1] else FORMATS["fp8-channel"]
    if method in ("awq", "gptq") and told.get("bits", 4) == 4:
        return _tiled(method, 1, told.get("group_size", 128))
    if method == "mxfp4":
        return FORMATS["mxfp4"]
    if method == "modelopt" or "quant_algo" in told:
        return {"FP8": FORMATS["fp8-channel"], "FP8_PB_WO": FORMATS["fp8"], "NVFP4": FORMATS["nvfp4"]}.get(
            told.get("quant_algo", "")
        )
    if method == "compressed-tensors":
        groups = told.get("config_groups") or {"": {}}
        return _compressed_format(next(iter(groups.values())).get("weights") or {})
    return None


def _compressed_format(weights: Config) -> NumberFormat | None:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if bits == 8 and kind == "float":
        return FORMATS["fp8" if strategy == "block" else "fp8-channel"]
    if bits == 4 and kind == "int":
        return _tiled("int4", 1, weights.get("group_size") or 128)
    if bits == 4 and kind == "float":
        return FORMATS["nvfp4" if weights.get("group_size") == 16 else "mxfp4"]
    return None


def _tiled(name: str, rows: int, columns: int) -> NumberFormat:
    """The format with another tile; -1 columns are a whole row."""
    if rows < 1 or columns == 0:
        raise ValueError(f"blocks of {rows} x {columns}")
    return dataclasses.replace(FORMATS[name], tile=(int(rows), int(columns) if columns > 0 else None))


def is_loadable(told: Config) -> bool:
    """Block FP8 as DeepSeek and Qwen publish it, compressed-tensors FP8 with scales by block or channel, and MXFP4."""
    if told.get("quant_method") == "mxfp4":
        return True
    if told.get("quant_method") == "fp8":
        return bool(told.get("weight_block_size"))
    if told.get("quant_method") != "compressed-tensors" or told.get("format") != "float-quantized":
        return False
    groups = list((told.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    square = weights.get("block_structure") in (None, [128, 128])
    return weights.get("type") == "float" and weights.get("strategy") in ("channel", "block") and square
