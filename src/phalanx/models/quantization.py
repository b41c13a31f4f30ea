"""How a `config.json` tells of quantised weights, in whichever of the field's dialects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from phalanx.errors import ModelError
from phalanx.models.fields import Config, dtype
from phalanx.spec import schemes
from phalanx.spec.formats import FORMATS
from phalanx.spec.schemes import Quantization, Scheme

LOADED = (
    "FP8 (by block, channel or tensor), AWQ (gemm), GPTQ (without act-order), compressed-tensors (W4A16, FP8, NVFP4, "
    "MXFP4), ModelOpt (FP8, NVFP4) and MXFP4"
)
"""The quantised formats that the runtime reads, in words."""

_SKIP_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_LEAST_GROUP = 32


def quantization(config: Config) -> Quantization | None:
    """How the linear layers are kept, in whichever of the field's dialects it is told."""
    told = config.get("quantization_config")
    if not told:
        return None
    scheme = _told_scheme(told, config)
    if scheme is None:
        raise ModelError(
            "unsupported_quantization",
            f"The checkpoint is quantised as {told.get('quant_method')!r} "
            f"({told.get('format') or told.get('bits') or told.get('quant_algo') or 'no further format'}).",
            f"Known formats: {', '.join(FORMATS)}.",
        )
    skipped = next((told[key] for key in _SKIP_KEYS if told.get(key)), ())
    return Quantization(scheme, _modules(*skipped, *_left_out(told)), targets=_modules(*_targets(told)))


def _modules(*told: object) -> tuple[str, ...]:
    for module in told:
        if not isinstance(module, str):
            raise ValueError(f"quantization_config names a module {module!r}")
        try:
            re.compile(module[3:] if module.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"quantization_config has {module!r}, which is no pattern: {error}") from error
    return tuple(map(str, told))


def _left_out(told: Config) -> Iterator[str]:
    """GPTQ's own words for modules that were left as they are."""
    yield from (f"re:{rule[2:]}" for rule in told.get("dynamic") or {} if rule.startswith("-:"))


def _targets(told: Config) -> tuple[str, ...]:
    found = tuple(target for group in _groups(told) for target in group.get("targets") or ())
    return () if "Linear" in found else found


def _groups(told: Config) -> list[Config]:
    return list((told.get("config_groups") or {}).values())


def _told_scheme(told: Config, config: Config) -> Scheme | None:
    if told.get("quant_method") == "modelopt" or "quant_algo" in told:
        return _modelopt(told)
    known: dict[str, Callable[[], Scheme | None]] = {
        "fp8": lambda: _fp8(told),
        "awq": lambda: schemes.awq(_group(told)) if _bits(told) == 4 else None,
        "gptq": lambda: schemes.gptq(_group(told), _zero_shift(told)) if _bits(told) == 4 else None,
        "mxfp4": schemes.mxfp4,
        "compressed-tensors": lambda: _compressed((_groups(told) or [{}])[0].get("weights") or {}, config),
    }
    read = known.get(told.get("quant_method", ""))
    return read() if read else None


def _fp8(told: Config) -> Scheme:
    block = told.get("weight_block_size")
    if not block:
        return schemes.fp8(FORMATS["fp8-channel"], per_tensor=True)
    rows, columns = int(block[0]), int(block[1])
    if rows < 1 or columns < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    return schemes.fp8(dataclasses.replace(FORMATS["fp8"], tile=(rows, columns)))


def _group(told: Config, default: int = 128) -> int | None:
    """Columns that share a scale; -1 are a whole row."""
    group = int(told.get("group_size") or default)
    if group == 0 or group < -1:
        raise ValueError(f"groups of {group}")
    return group if group > 0 else None


def _bits(told: Config) -> object:
    return told.get("bits", told.get("w_bit", 4))


def _zero_shift(told: Config) -> int:
    """The first form of GPTQ's files keeps zero points less one."""
    return 0 if _gptq_form(told) == "gptq_v2" else 1


def _gptq_form(told: Config) -> object:
    return told.get("checkpoint_format") or told.get("format") or "gptq"


def _modelopt(told: Config) -> Scheme | None:
    known: dict[str, Callable[[], Scheme]] = {
        "FP8": lambda: schemes.fp8(FORMATS["fp8-channel"], "_scale", per_tensor=True),
        "FP8_PB_WO": lambda: schemes.fp8(FORMATS["fp8"], "_scale"),
        "NVFP4": lambda: schemes.nvfp4("", "_scale_2", divides=False),
    }
    read = known.get(told.get("quant_algo", ""))
    return read() if read else None


def _compressed(weights: Config, config: Config) -> Scheme | None:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if bits == 8 and kind == "float":
        name = "fp8" if strategy == "block" else "fp8-channel"
        return schemes.fp8(FORMATS[name], "_scale", per_tensor=strategy == "tensor")
    if bits == 4 and kind == "int":
        group = None if strategy == "channel" else _group(weights)
        return schemes.packed_int4(group, bool(weights.get("symmetric", True)), dtype(config))
    if bits == 4 and kind == "float":
        by_sixteen = weights.get("group_size") == 16
        return schemes.nvfp4("_packed", "_global_scale", divides=True) if by_sixteen else schemes.compressed_mxfp4()
    return None


def unloadable(told: Config) -> str | None:
    """What of a known format the runtime does not read; None where it reads it."""
    found = list(_obstacles(told))
    return found[0] if found else None


def _obstacles(told: Config) -> Iterator[str]:
    method = told.get("quant_method")
    if method in ("awq", "gptq"):
        yield from _packed_obstacles(told, method)
    elif method == "compressed-tensors":
        yield from _compressed_obstacles(told)
    elif told.get("quant_algo") == "FP8_PB_WO":
        yield "quant_algo is FP8_PB_WO"
    if method == "fp8" and told.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        yield f"fmt is {told['fmt']!r}"


def _packed_obstacles(told: Config, method: str) -> Iterator[str]:
    yield from _group_obstacles(told)
    if told.get("desc_act"):
        yield "desc_act is true: inputs are reordered (act-order)"
    if method == "awq" and str(told.get("version", "gemm")).lower() != "gemm":
        yield f"version is {told['version']!r}"
    if method == "awq" and not told.get("zero_point", True):
        yield "zero_point is false"
    if method == "gptq" and _gptq_form(told) not in ("gptq", "gptq_v2"):
        yield f"its format is {_gptq_form(told)!r}"
    if told.get("rotation"):
        yield f"rotation is {told['rotation']!r}"
    yield from (f"dynamic has {rule!r}" for rule in told.get("dynamic") or {} if not rule.startswith("-:"))


def _group_obstacles(told: Config) -> Iterator[str]:
    group = _group(told)
    if group is not None and group % _LEAST_GROUP:
        yield f"group_size is {group}, no multiple of {_LEAST_GROUP}"


_FORMS = {"float-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"}


def _compressed_obstacles(told: Config) -> Iterator[str]:
    groups = _groups(told)
    form = groups[0].get("format") or told.get("format") if groups else told.get("format")
    if len(groups) != 1:
        yield f"config_groups has {len(groups)} members"
        return
    if form not in _FORMS:
        yield f"format is {form!r}"
    if (told.get("transform_config") or {}).get("config_groups"):
        yield "transform_config tells of transforms"
    weights = groups[0].get("weights") or {}
    if weights.get("actorder") not in (None, False, "weight", "static"):
        yield f"actorder is {weights['actorder']!r}: inputs are reordered"
    if weights.get("block_structure") not in (None, [128, 128]):
        yield f"block_structure is {weights['block_structure']}"
    if form == "pack-quantized" and weights.get("strategy") not in ("group", "channel"):
        yield f"strategy is {weights.get('strategy')!r}"
    if form == "pack-quantized" and weights.get("strategy") == "group":
        yield from _group_obstacles(weights)
    if form == "float-quantized" and weights.get("strategy") not in ("channel", "block", "tensor"):
        yield f"strategy is {weights.get('strategy')!r}"
