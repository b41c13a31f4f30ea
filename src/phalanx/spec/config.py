"""Reads a Hugging Face `config.json` into a ModelSpec, one small reader a family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError
from phalanx.spec.model import BlockFp8, ModelSpec, Moe, Rope

Config = Mapping[str, Any]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
}
"""What a family means by a field it leaves out, where that is not what the others mean."""

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def read_config(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec from a config dictionary, a `config.json` or the folder that holds one."""
    config = source if isinstance(source, Mapping) else _read_json(Path(source))
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            "unknown_architecture",
            f"The configuration says model_type {family!r}.",
            f"Phalanx runs {', '.join(FAMILIES)}.",
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            "unsupported_activation",
            f"The configuration says hidden_act {config['hidden_act']!r}.",
            f"Phalanx runs {family} models with 'silu'.",
        )
    given = {key: value for key, value in config.items() if value is not None}
    return FAMILIES[family](_DEFAULTS.get(family, {}) | given)


def _read_json(path: Path) -> Config:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            "no_config", f"There is no {path}.", "Name a folder that holds a Hugging Face checkpoint."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError("bad_config", f"{path} is not JSON: {error}.", "Download the file again.") from None
    if not isinstance(config, dict):
        raise ModelError("bad_config", f"{path} holds no JSON object.", "Download the file again.")
    return config


def _llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=(),
    )


def _qwen2(config: Config) -> ModelSpec:
    return _decoder(config, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=_qwen_windows(config))


def _qwen3_moe(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    step, dense = _count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    layers = range(_count(config, "num_hidden_layers"))
    sparse = (layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    moe = Moe(
        experts=_count(config, "num_experts", "num_local_experts"),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "moe_intermediate_size"),
        renormalise=bool(config.get("norm_topk_prob", False)),
        sparse_layers=frozenset(sparse),
    )
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windows = _same_window(config, window)
    return _decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, moe=moe, windows=windows)


def _mixtral(config: Config) -> ModelSpec:
    moe = Moe(
        experts=_count(config, "num_local_experts", "num_experts"),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(_count(config, "num_hidden_layers"))),
    )
    names = ("block_sparse_moe", "w1", "w3", "w2")
    windows = _same_window(config, config.get("sliding_window"))
    return _decoder(config, moe=moe, expert_names=names, windows=windows)


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}


def _decoder(config: Config, **family: Any) -> ModelSpec:
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    head_dim = _count(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(
            "bad_heads",
            f"{heads} query heads do not share {kv_heads} KV heads evenly.",
            "num_attention_heads must be a multiple of num_key_value_heads.",
        )
    max_positions = _count(config, "max_position_embeddings")
    return ModelSpec(
        model_type=config["model_type"],
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        vocab=_count(config, "vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, head_dim, max_positions),
        max_positions=max_positions,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        block_fp8=_quantization(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
        **family,
    )


def _count(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ModelError("bad_config", f"{name} is {value!r}.", "It must be a positive whole number.")
    if default is not None:
        return default
    raise ModelError("bad_config", f"The configuration has no {names[0]}.", "Is this a causal language model's config?")


def _dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelError("bad_dtype", f"The configuration says dtype {name!r}.", f"Known: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _same_window(config: Config, window: int | None) -> tuple[int | None, ...]:
    return (window,) * _count(config, "num_hidden_layers") if window else ()


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    window, layers = config.get("sliding_window"), _count(config, "num_hidden_layers")
    if not config.get("use_sliding_window") or not window:
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


def _rope(config: Config, head_dim: int, max_positions: int) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    scaling: dict[str, Any] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        found = config.get(spelling, {})
        if not isinstance(found, Mapping):
            raise ModelError("bad_config", f"{spelling} is {found!r}.", "It must be an object.")
        scaling |= found
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return Rope(theta, rotary_dim)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            "unsupported_rope",
            f"The configuration asks for rope type {kind!r}.",
            "Phalanx runs default, linear, llama3 and yarn.",
        )
    if not isinstance(scaling.get("factor"), int | float):
        raise ModelError(
            "bad_config", f"rope type {kind!r} comes with factor {scaling.get('factor')!r}.", "It must be a number."
        )
    factor = float(scaling["factor"])
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    return Rope(
        theta,
        rotary_dim,
        kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _quantization(config: Config) -> BlockFp8 | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") == "fp8" and block and block[0] == block[1]:
        skipped = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
        return BlockFp8(int(block[0]), tuple(skipped))
    raise ModelError(
        "unsupported_quantization",
        f"The checkpoint is quantised as {quantization.get('quant_method')!r} "
        f"({quantization.get('format') or quantization.get('bits') or 'no further format'}).",
        "Phalanx reads bf16, fp16, fp32, block-FP8 and GGUF; use such a version of this model.",
    )
