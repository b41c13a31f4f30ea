"""One small reader a family: from its `config.json` to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.errors import ModelError
from phalanx.spec.fields import Config, count, dtype, each_layer, layer_count, token_ids, whole
from phalanx.spec.model import DeltaNet, Indexer, Mla, ModelSpec, Moe
from phalanx.spec.quantization import quantization
from phalanx.spec.rope import rope

DEFAULTS: dict[str, dict[str, Any]] = {
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


def _decoder(config: Config, **family: Any) -> ModelSpec:
    heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    head_dim = count(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(
            "bad_heads",
            f"{heads} query heads do not share {kv_heads} KV heads evenly.",
            "num_attention_heads must be a multiple of num_key_value_heads.",
        )
    max_positions = count(config, "max_position_embeddings")
    return ModelSpec(
        model_type=config["model_type"],
        layers=layer_count(config),
        hidden=hidden,
        vocab=count(config, "vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=count(config, "intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope(config, head_dim, max_positions),
        max_positions=max_positions,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype(config),
        quantization=quantization(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        **family,
    )


def _same_window(config: Config, window: int | None) -> tuple[int | None, ...]:
    return (window,) * layer_count(config) if window else ()


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    window, layers = config.get("sliding_window"), layer_count(config)
    if not config.get("use_sliding_window") or not window:
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


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
    step, dense = count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    layers = range(layer_count(config))
    sparse = (layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    moe = Moe(
        experts=count(config, "num_experts", "num_local_experts"),
        experts_per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "moe_intermediate_size"),
        renormalise=bool(config.get("norm_topk_prob", False)),
        sparse_layers=frozenset(sparse),
    )
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windows = _same_window(config, window)
    return _decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, moe=moe, windows=windows)


def _mixtral(config: Config) -> ModelSpec:
    moe = Moe(
        experts=count(config, "num_local_experts", "num_experts"),
        experts_per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(layer_count(config))),
    )
    names = ("block_sparse_moe", "w1", "w3", "w2")
    windows = _same_window(config, config.get("sliding_window"))
    return _decoder(config, moe=moe, expert_names=names, windows=windows)


def _mistral(config: Config) -> ModelSpec:
    return _decoder(config, windows=_same_window(config, config.get("sliding_window")))


def _gpt_oss(config: Config) -> ModelSpec:
    layers, window = layer_count(config), count(config, "sliding_window", default=128)
    kinds = each_layer(config, "layer_types") or ["sliding_attention", "full_attention"] * layers
    moe = Moe(
        experts=count(config, "num_local_experts", "num_experts"),
        experts_per_token=count(config, "num_experts_per_tok", "experts_per_token"),
        intermediate=count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(layers)),
        bias=True,
    )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
    return _decoder(config, moe=moe, windows=windows, qkv_bias=True, output_bias=True, sinks=True)


def _llama4(config: Config) -> ModelSpec:
    layers = range(layer_count(config))
    step = count(config, "interleave_moe_layer_step", default=1)
    intermediate = count(config, "intermediate_size")
    moe = Moe(
        experts=count(config, "num_local_experts"),
        experts_per_token=count(config, "num_experts_per_tok", default=1),
        intermediate=intermediate,
        renormalise=False,
        sparse_layers=frozenset(config.get("moe_layers") or range(step - 1, len(layers), step)),
        shared=intermediate,
    )
    every = count(config, "no_rope_layer_interval", default=4)
    ropes = each_layer(config, "no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    chunk = whole(config, "attention_chunk_size") or None
    windows = tuple(chunk if ropes[layer] else None for layer in layers)
    dense = dict(config) | {"intermediate_size": count(config, "intermediate_size_mlp", default=intermediate)}
    return _decoder(dense, moe=moe, windows=windows, chunked=True)


def _glm4_moe(config: Config) -> ModelSpec:
    bias, norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    return _decoder(config, moe=_deepseek_moe(config), qkv_bias=bias, qk_norm=norm)


def _minimax_m2(config: Config) -> ModelSpec:
    moe = Moe(
        experts=count(config, "num_local_experts"),
        experts_per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "intermediate_size"),
        renormalise=True,
        sparse_layers=frozenset(range(layer_count(config))),
        correction_bias=True,
    )
    return _decoder(config, moe=moe, qk_norm=True, qk_norm_whole=True)


def _qwen3_next(config: Config) -> ModelSpec:
    """Every fourth layer attends with an output gate, the others are gated delta nets."""
    layers = range(layer_count(config))
    every = count(config, "full_attention_interval", default=4)
    kinds = each_layer(config, "layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in layers
    ]
    delta = DeltaNet(
        k_heads=count(config, "linear_num_key_heads"),
        v_heads=count(config, "linear_num_value_heads"),
        k_dim=count(config, "linear_key_head_dim"),
        v_dim=count(config, "linear_value_head_dim"),
        kernel=count(config, "linear_conv_kernel_dim", default=4),
        layers=frozenset(layer for layer in layers if kinds[layer] == "linear_attention"),
        fused=config["model_type"] == "qwen3_next",
    )
    sparse = "num_experts" in config
    moe = _qwen_shared_moe(config) if sparse else None
    intermediate = {"intermediate_size": count(config, "moe_intermediate_size")} if sparse else {}
    return _decoder(intermediate | dict(config), moe=moe, delta=delta, qk_norm=True, query_gate=True)


def _qwen_shared_moe(config: Config) -> Moe:
    step, dense = count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    layers = range(layer_count(config))
    return Moe(
        experts=count(config, "num_experts"),
        experts_per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "moe_intermediate_size"),
        renormalise=bool(config.get("norm_topk_prob", True)),
        sparse_layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        shared=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _deepseek(config: Config) -> ModelSpec:
    """Latent attention, and where the configuration has one, the indexer of sparse attention."""
    mla = Mla(
        q_rank=whole(config, "q_lora_rank") or None,
        kv_rank=count(config, "kv_lora_rank"),
        nope_dim=count(config, "qk_nope_head_dim"),
        rope_dim=count(config, "qk_rope_head_dim"),
        v_dim=count(config, "v_head_dim"),
    )
    one_latent = {"num_key_value_heads": 1, "head_dim": mla.nope_dim + mla.rope_dim}
    return _decoder(dict(config) | one_latent, moe=_deepseek_moe(config), mla=mla, indexer=_indexer(config))


def _indexer(config: Config) -> Indexer | None:
    if "index_topk" not in config:
        return None
    layers = range(layer_count(config))
    kinds = each_layer(config, "indexer_types") or ["full"] * len(layers)
    return Indexer(
        heads=count(config, "index_n_heads"),
        head_dim=count(config, "index_head_dim"),
        top_k=count(config, "index_topk"),
        layers=frozenset(layer for layer in layers if kinds[layer] != "shared"),
    )


def _deepseek_moe(config: Config) -> Moe:
    layers = layer_count(config)
    inner = count(config, "moe_intermediate_size")
    kinds = each_layer(config, "mlp_layer_types")
    first = whole(config, "first_k_dense_replace")
    sparse = (layer for layer in range(layers) if (kinds[layer] == "sparse" if kinds else layer >= first))
    return Moe(
        experts=count(config, "n_routed_experts", "num_experts"),
        experts_per_token=count(config, "num_experts_per_tok"),
        intermediate=inner,
        renormalise=bool(config.get("norm_topk_prob", True)),
        sparse_layers=frozenset(sparse),
        shared=inner * whole(config, "n_shared_experts"),
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
