"""DeepSeek V3 and those in its likeness: latent attention, and experts chosen by groups.

V3.2 and GLM 5 add an indexer: a token looks only at those it chooses.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

from phalanx.models.family import Family, activation, decoder, refuse_unless
from phalanx.models.fields import Config, count, each_layer, layer_count, number, whole
from phalanx.models.ropes import magnitude, rope, scaling_of
from phalanx.spec.draft_head import DraftHead
from phalanx.spec.ffn import Dense, Moe, Router
from phalanx.spec.latent import Indexer, Mla
from phalanx.spec.layer import Layer, Mixer
from phalanx.spec.model import ModelSpec


class Habits(NamedTuple):
    """What a family means by fields that a configuration leaves out."""

    groups: int = 1
    kept_groups: int = 1
    scaling: float = 2.5
    dense_layers: int = 3
    norm_eps: float = 1e-5
    turns_index_pairs: bool = True


MOST_HEADS = 4
"""Further layers that a checkpoint may have behind its last one."""

DEEPSEEK = Habits(groups=8, kept_groups=4, norm_eps=1e-6, turns_index_pairs=False)


def read(config: Config, habits: Habits) -> ModelSpec:
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "mlp_bias", False)
    nope, rope_dim = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
    mixers = [
        Mla(
            heads=count(config, "num_attention_heads"),
            q_rank=whole(config, "q_lora_rank") or None,
            kv_rank=count(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope_dim,
            v_dim=count(config, "v_head_dim"),
            rope=rope(config, rope_dim),
            scale=(nope + rope_dim) ** -0.5 * _sharpness(config),
            interleaved=bool(config.get("rope_interleave", True)),
            indexer=indexer,
        )
        for indexer in _indexers(config, habits)
    ]
    layers = [Layer(mixer, ffn) for mixer, ffn in zip(mixers, ffns(config, habits), strict=True)]
    indexer = mixers[0].indexer and dataclasses.replace(mixers[0].indexer, own=True)
    return decoder(
        config,
        layers,
        norm_eps=habits.norm_eps,
        head=draft_head(config, dataclasses.replace(mixers[0], indexer=indexer), habits),
        ignored=(speculative_layers(config),),
    )


def draft_head(config: Config, mixer: Mixer, habits: Habits) -> DraftHead | None:
    """Behind the last layer, with experts; of several the first."""
    if not whole(config, "num_nextn_predict_layers"):
        return None
    path = f"model.layers.{layer_count(config)}."
    return DraftHead(Layer(mixer, experts(config, habits)), path, path)


def speculative_layers(config: Config) -> str:
    """Behind the last layer lie those that draft tokens, with copies of embedding and head."""
    return rf"model\.layers\.({'|'.join(str(layer_count(config) + n) for n in range(MOST_HEADS))})\..*"


def _sharpness(config: Config) -> float:
    """YaRN's, which these models put on the scores instead of on cos and sin."""
    scaling = scaling_of(config)
    scale = scaling.get("mscale_all_dim")
    return magnitude(float(scaling.get("factor", 1.0)), scale) ** 2 if scale else 1.0


def _indexers(config: Config, habits: Habits) -> list[Indexer | None]:
    layers = layer_count(config)
    if "index_topk" not in config:
        return [None] * layers
    heads, head_dim = count(config, "index_n_heads"), count(config, "index_head_dim")
    top_k = count(config, "index_topk")
    return [
        Indexer(heads, head_dim, top_k, own=own, interleaved=habits.turns_index_pairs) for own in _own_indexers(config)
    ]


def _own_indexers(config: Config) -> list[bool]:
    layers = layer_count(config)
    kinds = each_layer(config, "indexer_types") or each_layer(config, "index_topk_pattern")
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    if kinds:
        return [kind != "shared" for kind in kinds[:layers]]
    every, offset = count(config, "index_topk_freq", default=1), config.get("index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]


def ffns(config: Config, habits: Habits) -> list[Dense | Moe]:
    """Experts in the manner of DeepSeek V3, behind some dense layers."""
    kinds = each_layer(config, "mlp_layer_types")
    first = int(config.get("first_k_dense_replace", habits.dense_layers))
    moe, dense = experts(config, habits), Dense(count(config, "intermediate_size"), activation(config))
    sparse = [kinds[layer] == "sparse" if kinds else layer >= first for layer in range(layer_count(config))]
    return [moe if each else dense for each in sparse]


def experts(config: Config, habits: Habits) -> Moe:
    inner = count(config, "moe_intermediate_size")
    router = Router(
        count(config, "n_routed_experts", "num_experts", "num_local_experts"),
        count(config, "num_experts_per_tok"),
        score="sigmoid",
        renormalise=bool(config.get("norm_topk_prob", True)),
        scaling=number(config, "routed_scaling_factor", habits.scaling),
        groups=count(config, "n_group", default=habits.groups),
        kept_groups=count(config, "topk_group", default=habits.kept_groups),
        correction=True,
        wide=True,
    )
    shared = inner * int(config.get("n_shared_experts", 1))
    return Moe(router, inner, activation(config), shared=shared)


INERT = ("topk_method", "scoring_func", "moe_layer_freq", "ep_size", "num_key_value_heads", "qk_head_dim")


def parsers(name: str) -> tuple[str | None, str | None]:
    if "r1" in name:
        return "deepseek_r1", None
    return ("deepseek_r1", "deepseek_v31") if "v3.1" in name else (None, None)


FAMILIES = {
    name: Family(partial(read, habits=habits), inert=INERT, parsers=parsers)
    for name, habits in {
        "deepseek_v3": DEEPSEEK,
        "deepseek_v32": DEEPSEEK,
        "kimi_k2": DEEPSEEK,
        "kimi_k25": DEEPSEEK,
        "glm4_moe_lite": Habits(scaling=1.8, dense_layers=1),
        "glm_moe_dsa": Habits(),
    }.items()
}
