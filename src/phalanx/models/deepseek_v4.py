"""DeepSeek V4: attention to compressed entries, several residual streams, and first layers routed by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError
from phalanx.models.family import Family, activation, decoder, refuse_unless
from phalanx.models.fields import Config, count, each_layer, layer_count, number, whole
from phalanx.models.ropes import read_rope, scaling_of
from phalanx.spec.compressed import Compressed
from phalanx.spec.draft_head import MOST_DRAFTS, DraftHead, HeadNames
from phalanx.spec.ffn import Fused, Moe, Router
from phalanx.spec.hyper import Hyper
from phalanx.spec.latent import Indexer
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.model import ModelSpec
from phalanx.spec.rope import Rope
from phalanx.spec.schemes import Quantization, fp8, mxfp4

NORMS = Norms(wide=True)
HEAD_NAMES = HeadNames(joins=("e_proj", "h_proj"), norm="norm")
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_RATIOS = {SPARSE: 4, HEAVY: 128}
_SPELT_BELOW = (
    (".self_attn.compressor.indexer.scorer.", ".attn.indexer."),
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".position_bias", ".ape"),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".sinks", ".attn_sink"),
    (".mlp.", ".ffn."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    ("lm_head.", "head."),
    ("mtp.0.hc_head.hc_", "mtp.0.hc_head_"),
)
_HUB = (
    *_SPELT_BELOW,
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "embed."),
    ("model.norm.", "norm."),
    ("model.hc_head.hc_", "hc_head_"),
)
"""As DeepSeek publishes it."""
_SAVED = (*_SPELT_BELOW, (".attn.kv_norm.", ".attn.norm."))
"""As transformers writes it."""


def read(config: Config) -> ModelSpec:
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "mlp_bias", False)
    refuse_unless(config, "num_key_value_heads", 1)
    layers = [Layer(mixer, ffn, NORMS) for mixer, ffn in zip(_mixers(config), _ffns(config), strict=True)]
    hyper = Hyper(
        count(config, "hc_mult", default=4),
        count(config, "hc_sinkhorn_iters", default=20),
        number(config, "hc_eps", 1e-6, least=0),
    )
    spec = decoder(
        config,
        layers,
        hyper=hyper,
        head=_head(config),
        spellings=(_HUB, _SAVED),
        ignored=(r"(model\.)?mtp\..*",),
    )
    return _as_published(spec, config)


def _head(config: Config) -> DraftHead | None:
    """It looks at a window alone, with room for the drafts that it goes on from, and its experts are chosen."""
    if not count_of_heads(config):
        return None
    near = dataclasses.replace(_mixer_kinds(config)[SLIDING], slack=MOST_DRAFTS)
    return DraftHead(Layer(near, _ffn_kinds(config)["moe"], NORMS), "mtp.0.", "mtp.0.", HEAD_NAMES)


def count_of_heads(config: Config) -> int:
    """Those that look at entries too are not known."""
    ratios = config.get("compress_ratios") or ()
    behind = ratios[layer_count(config)] if len(ratios) > layer_count(config) else 0
    return 0 if behind else whole(config, "num_nextn_predict_layers")


def _mixers(config: Config) -> list[Compressed]:
    kinds = _mixer_kinds(config)
    return [kinds[kind] for kind in _layer_kinds(config)]


def _mixer_kinds(config: Config) -> dict[str, Compressed]:
    heads, head_dim, groups = (count(config, name) for name in ("num_attention_heads", "head_dim", "o_groups"))
    if heads % groups:
        raise ModelError(
            "bad_heads",
            f"{heads} query heads do not make {groups} groups.",
            "num_attention_heads must be a multiple of o_groups.",
        )
    turned, turned_far = _ropes(config, head_dim)
    near = Compressed(
        heads,
        head_dim,
        q_rank=count(config, "q_lora_rank"),
        rope=turned,
        scale=head_dim**-0.5,
        window=count(config, "sliding_window"),
        groups=groups,
        group_rank=count(config, "o_lora_rank"),
    )
    ratios = _ratios(config)
    indexer = Indexer(count(config, "index_n_heads"), count(config, "index_head_dim"), count(config, "index_topk"))
    return {
        SLIDING: near,
        SPARSE: dataclasses.replace(near, rope=turned_far, ratio=ratios[SPARSE], indexer=indexer),
        HEAVY: dataclasses.replace(near, rope=turned_far, ratio=ratios[HEAVY]),
    }


def _layer_kinds(config: Config) -> list[str]:
    layers = layer_count(config)
    told = each_layer(config, "layer_types")
    if told is None:
        told = [_KINDS[ratio] for ratio in each_layer(config, "compress_ratios") or ()]
    alternating = [HEAVY] * 2 + [SPARSE if layer % 2 else HEAVY for layer in range(layers)]
    return (told or alternating)[:layers]


def _ratios(config: Config) -> dict[str, int]:
    told = {**_RATIOS, **config.get("compress_rates", {})}
    return {
        SPARSE: count(config, "compress_rate_csa", default=count(told, SPARSE)),
        HEAVY: count(config, "compress_rate_hca", default=count(told, HEAVY)),
    }


def _ropes(config: Config, head_dim: int) -> tuple[Rope, Rope]:
    """Of layers that look at a window alone, and of those that look at entries too."""
    told = config.get("rope_parameters", {})
    if all(isinstance(told.get(kind), Mapping) for kind in ("main", "compress")):
        plain, stretched = told["main"], told["compress"]
    else:
        rotated = float(config.get("partial_rotary_factor") or count(config, "qk_rope_head_dim", default=64) / head_dim)
        plain = {"rope_theta": number(config, "rope_theta", 10000.0), "partial_rotary_factor": rotated}
        theta = number(config, "compress_rope_theta", 160000.0)
        flat: dict[str, Any] = {"attention_factor": 1.0} | scaling_of(config)
        stretched = flat | {"rope_theta": theta, "partial_rotary_factor": rotated}
    return read_rope(plain, config, head_dim, 10000.0), read_rope(stretched, config, head_dim, 160000.0)


def _ffns(config: Config) -> list[Moe]:
    kinds, layers = each_layer(config, "mlp_layer_types"), layer_count(config)
    if kinds is None:
        first = int(config.get("num_hash_layers", 3))
        kinds = ["hash_moe" if layer < first else "moe" for layer in range(layers)]
    found = _ffn_kinds(config)
    return [found[kind] for kind in kinds[:layers]]


def _ffn_kinds(config: Config) -> dict[str, Moe]:
    refuse_unless(config, "scoring_func", "sqrtsoftplus")
    refuse_unless(config, "norm_topk_prob", True)
    refuse_unless(config, "n_shared_experts", 1)
    inner = count(config, "moe_intermediate_size")
    router = Router(
        count(config, "n_routed_experts", "num_local_experts"),
        count(config, "num_experts_per_tok"),
        score="sqrt_softplus",
        renormalise=True,
        scaling=number(config, "routed_scaling_factor", 1.5),
        correction=True,
    )
    gate = activation(config)._replace(limit=number(config, "swiglu_limit", 10.0))
    chosen = Moe(router, inner, gate, shared=inner, fused=Fused())
    table = dataclasses.replace(router, correction=False, hashed=count(config, "vocab_size"))
    return {"hash_moe": dataclasses.replace(chosen, router=table), "moe": chosen}


def _as_published(spec: ModelSpec, config: Config) -> ModelSpec:
    """DeepSeek's own files have experts in MXFP4 and most other matrices in FP8, all with scales of their own names."""
    told = config.get("quantization_config", {})
    experts = told.get("expert_dtype") or config.get("expert_dtype")
    if spec.quantization is None or told.get("quant_method") != "fp8":
        return spec
    block = fp8(spec.quantization.format, "scale")
    if experts == "fp4":
        mixed = Quantization(mxfp4("", "scale", in_blocks=False), _WIDE, others=block)
    else:
        mixed = Quantization(block, _WIDE)
    return dataclasses.replace(spec, quantization=mixed)


_WIDE = ("compressor",)
"""Modules that stay bf16, with the indexer in them."""
_INERT = ("qk_rope_head_dim", "partial_rotary_factor", "compress_rope_theta", "topk_method", "intermediate_size")
FAMILIES = {"deepseek_v4": Family(read, inert=_INERT)}
