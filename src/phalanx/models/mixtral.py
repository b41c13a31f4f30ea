"""Mixtral: experts in every layer, under names of their own."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, decoder
from phalanx.models.fields import Config, count, layer_count, whole
from phalanx.spec.ffn import ExpertNames, Moe, Router
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec

NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")


def read(config: Config) -> ModelSpec:
    mixer = attention(config, theta=1e6, window=whole(config, "sliding_window") or None)
    experts = count(config, "num_local_experts", "num_experts")
    router = Router(experts, count(config, "num_experts_per_tok"), renormalise=True)
    moe = Moe(router, count(config, "intermediate_size"), activation(config), names=NAMES)
    return decoder(config, [Layer(mixer, moe)] * layer_count(config), norm_eps=1e-5)


FAMILIES = {"mixtral": Family(read)}
