"""Reads a Hugging Face `config.json` into a ModelSpec, one small reader a family.

`describe` reads every family that can be planned; `read_config` those of them that the runtime serves.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError
from phalanx.spec.formats import FORMATS, NumberFormat, Quantization
from phalanx.spec.model import DeltaNet, Indexer, Mla, ModelSpec, Moe, Refusal, Rope

Config = Mapping[str, Any]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "gpt_oss": {"head_dim": 64},
    "llama4": {"head_dim": 128},
    "llama4_text": {"head_dim": 128},
    "minimax_m2": {"head_dim": 128},
    **{key: {"head_dim": 256} for key in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")},
}
"""What a family means by a field it leaves out, where that is not what the others mean."""

_MOST_LAYERS = 10_000

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def read_config(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec that can be served, from a config dictionary, a `config.json` or the folder that holds one."""
    spec = describe(source)
    if spec.refusal is not None:
        raise ModelError(*spec.refusal)
    return spec


def describe(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec of any family that can be planned; its `refusal` says why the runtime would not serve it."""
    config = source if isinstance(source, Mapping) else _read_json(Path(source))
    config = _text_part(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise _unknown_family(family)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            "unsupported_activation",
            f"The configuration says hidden_act {config['hidden_act']!r}.",
            f"Phalanx runs {family} models with 'silu'.",
        )
    given = {key: value for key, value in config.items() if value is not None}
    try:
        spec = FAMILIES[family](_DEFAULTS.get(family, {}) | given)
        return dataclasses.replace(spec, refusal=_refusal(family, given))
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(
            "bad_config",
            f"The configuration has a value of the wrong kind: {error}.",
            "Compare it with the model's own config.json.",
        ) from error


def _text_part(config: Config) -> Config:
    """The language model of a configuration that also describes eyes or ears."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {key: config[key] for key in ("model_type", "quantization_config", "torch_dtype", "dtype") if key in config}
    return outer | {key: value for key, value in text.items() if value is not None}


def _unknown_family(family: object) -> ModelError:
    near = get_close_matches(str(family), FAMILIES, n=1)
    planned = ", ".join(name for name in FAMILIES if name not in SERVED)
    return ModelError(
        "unknown_architecture",
        f"The configuration says model_type {family!r}.",
        (f"The nearest is {near[0]}. " if near else "")
        + f"Phalanx runs {', '.join(SERVED)}, and plans for {planned} too.",
    )


def _refusal(family: str, config: Config) -> Refusal | None:
    if family not in SERVED:
        return Refusal(
            "unsupported_architecture",
            f"The configuration says model_type {family!r}, which Phalanx plans for but does not run.",
            f"Phalanx runs {', '.join(SERVED)}.",
        )
    quantization = config.get("quantization_config")
    if not quantization or _is_loadable(quantization):
        return None
    return Refusal(
        "unsupported_quantization",
        f"The checkpoint is quantised as {quantization.get('quant_method')!r} "
        f"({quantization.get('format') or quantization.get('bits') or 'no further format'}).",
        "Phalanx reads bf16, fp16, fp32, FP8 with a scale per block or per channel, and GGUF: use such a version.",
    )


def _is_loadable(told: Config) -> bool:
    """Block FP8 as DeepSeek and Qwen publish it, and compressed-tensors FP8 with scales by block or channel."""
    if told.get("quant_method") == "fp8":
        return bool(told.get("weight_block_size"))
    if told.get("quant_method") != "compressed-tensors" or told.get("format") != "float-quantized":
        return False
    groups = list((told.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    square = weights.get("block_structure") in (None, [128, 128])
    return weights.get("type") == "float" and weights.get("strategy") in ("channel", "block") and square


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
    layers = range(_layers(config))
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
        sparse_layers=frozenset(range(_layers(config))),
    )
    names = ("block_sparse_moe", "w1", "w3", "w2")
    windows = _same_window(config, config.get("sliding_window"))
    return _decoder(config, moe=moe, expert_names=names, windows=windows)


def _mistral(config: Config) -> ModelSpec:
    return _decoder(config, windows=_same_window(config, config.get("sliding_window")))


def _gpt_oss(config: Config) -> ModelSpec:
    layers, window = _layers(config), _count(config, "sliding_window", default=128)
    kinds = _each_layer(config, "layer_types") or ["sliding_attention", "full_attention"] * layers
    moe = Moe(
        experts=_count(config, "num_local_experts", "num_experts"),
        experts_per_token=_count(config, "num_experts_per_tok", "experts_per_token"),
        intermediate=_count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(layers)),
        bias=True,
    )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
    return _decoder(config, moe=moe, windows=windows, qkv_bias=True, output_bias=True, sinks=True)


def _llama4(config: Config) -> ModelSpec:
    layers = range(_layers(config))
    step = _count(config, "interleave_moe_layer_step", default=1)
    intermediate = _count(config, "intermediate_size")
    moe = Moe(
        experts=_count(config, "num_local_experts"),
        experts_per_token=_count(config, "num_experts_per_tok", default=1),
        intermediate=intermediate,
        renormalise=False,
        sparse_layers=frozenset(config.get("moe_layers") or range(step - 1, len(layers), step)),
        shared=intermediate,
    )
    every = _count(config, "no_rope_layer_interval", default=4)
    ropes = _each_layer(config, "no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    chunk = _whole(config, "attention_chunk_size") or None
    windows = tuple(chunk if ropes[layer] else None for layer in layers)
    dense = dict(config) | {"intermediate_size": _count(config, "intermediate_size_mlp", default=intermediate)}
    return _decoder(dense, moe=moe, windows=windows, chunked=True)


def _glm4_moe(config: Config) -> ModelSpec:
    bias, norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    return _decoder(config, moe=_deepseek_moe(config), qkv_bias=bias, qk_norm=norm)


def _minimax_m2(config: Config) -> ModelSpec:
    moe = Moe(
        experts=_count(config, "num_local_experts"),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(_layers(config))),
        correction_bias=True,
    )
    return _decoder(config, moe=moe, qk_norm=True, qk_norm_whole=True)


def _qwen3_next(config: Config) -> ModelSpec:
    """Every fourth layer attends with an output gate, the others are gated delta nets."""
    layers = range(_layers(config))
    every = _count(config, "full_attention_interval", default=4)
    kinds = _each_layer(config, "layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in layers
    ]
    delta = DeltaNet(
        k_heads=_count(config, "linear_num_key_heads"),
        v_heads=_count(config, "linear_num_value_heads"),
        k_dim=_count(config, "linear_key_head_dim"),
        v_dim=_count(config, "linear_value_head_dim"),
        kernel=_count(config, "linear_conv_kernel_dim", default=4),
        layers=frozenset(layer for layer in layers if kinds[layer] == "linear_attention"),
        fused=config["model_type"] == "qwen3_next",
    )
    sparse = "num_experts" in config
    moe = _qwen_shared_moe(config) if sparse else None
    intermediate = {"intermediate_size": _count(config, "moe_intermediate_size")} if sparse else {}
    return _decoder(intermediate | dict(config), moe=moe, delta=delta, qk_norm=True, query_gate=True)


def _qwen_shared_moe(config: Config) -> Moe:
    step, dense = _count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    layers = range(_layers(config))
    return Moe(
        experts=_count(config, "num_experts"),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "moe_intermediate_size"),
        renormalise=bool(config.get("norm_topk_prob", True)),
        sparse_layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        shared=_count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _deepseek(config: Config) -> ModelSpec:
    """Latent attention, and where the configuration has one, the indexer of sparse attention."""
    mla = Mla(
        q_rank=_whole(config, "q_lora_rank") or None,
        kv_rank=_count(config, "kv_lora_rank"),
        nope_dim=_count(config, "qk_nope_head_dim"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        v_dim=_count(config, "v_head_dim"),
    )
    one_latent = {"num_key_value_heads": 1, "head_dim": mla.nope_dim + mla.rope_dim}
    return _decoder(dict(config) | one_latent, moe=_deepseek_moe(config), mla=mla, indexer=_indexer(config))


def _indexer(config: Config) -> Indexer | None:
    if "index_topk" not in config:
        return None
    layers = range(_layers(config))
    kinds = _each_layer(config, "indexer_types") or ["full"] * len(layers)
    return Indexer(
        heads=_count(config, "index_n_heads"),
        head_dim=_count(config, "index_head_dim"),
        top_k=_count(config, "index_topk"),
        layers=frozenset(layer for layer in layers if kinds[layer] != "shared"),
    )


def _deepseek_moe(config: Config) -> Moe:
    layers = _layers(config)
    inner = _count(config, "moe_intermediate_size")
    kinds = _each_layer(config, "mlp_layer_types")
    first = _whole(config, "first_k_dense_replace")
    sparse = (layer for layer in range(layers) if (kinds[layer] == "sparse" if kinds else layer >= first))
    return Moe(
        experts=_count(config, "n_routed_experts", "num_experts"),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=inner,
        renormalise=bool(config.get("norm_topk_prob", True)),
        sparse_layers=frozenset(sparse),
        shared=inner * _whole(config, "n_shared_experts"),
        correction_bias=True,
    )


SERVED: dict[str, Callable[[Config], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
FAMILIES = SERVED | {
    "mistral": _mistral,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _deepseek,
    "minimax_m2": _minimax_m2,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "kimi_k25": _deepseek,
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
        layers=_layers(config),
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
        quantization=_quantization(config),
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


def _layers(config: Config) -> int:
    layers = _count(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelError("bad_config", f"num_hidden_layers is {layers}.", f"It must be at most {_MOST_LAYERS}.")
    return layers


def _whole(config: Config, name: str) -> int:
    """A count that may be zero or left out."""
    return _count(config, name) if config.get(name) else 0


def _each_layer(config: Config, name: str) -> list[Any] | None:
    """A list with an entry for every layer, where the configuration has it."""
    found = config.get(name)
    if not found:
        return None
    if not isinstance(found, list) or len(found) < _layers(config):
        raise ModelError("bad_config", f"{name} is {str(found)[:60]!r}.", f"It must list all {_layers(config)} layers.")
    return found


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
    return (window,) * _layers(config) if window else ()


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    window, layers = config.get("sliding_window"), _layers(config)
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


def _quantization(config: Config) -> Quantization | None:
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
