"""Qwen 3, dense and with experts: queries and keys normed head by head."""

from __future__ import annotations

import dataclasses

from phalanx.models.family import Family, activation, attention, attention_biases, decoder, sparse_layers
from phalanx.models.fields import Config, count
from phalanx.models.qwen2 import windows
from phalanx.spec.ffn import Dense, Moe, Router
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read_dense(config: Config) -> ModelSpec:
    mixer = attention(config, head_dim=128, head_norm="each", **attention_biases(config))
    ffn = Dense(count(config, "intermediate_size"), activation(config))
    return decoder(config, [Layer(dataclasses.replace(mixer, window=window), ffn) for window in windows(config)])


def read_moe(config: Config) -> ModelSpec:
    window = count(config, "sliding_window", default=4096) if config.get("use_sliding_window") else None
    mixer = attention(config, window=window, head_norm="each", **attention_biases(config))
    router = Router(
        count(config, "num_experts", "num_local_experts"),
        count(config, "num_experts_per_tok"),
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    moe = Moe(router, count(config, "moe_intermediate_size"), activation(config))
    dense = Dense(count(config, "intermediate_size"), activation(config))
    return decoder(config, [Layer(mixer, moe if sparse else dense) for sparse in sparse_layers(config)])


def parsers(name: str) -> tuple[str | None, str | None]:
    if "coder" in name:
        return None, "qwen3_xml"
    return None if "instruct" in name else "qwen3", "hermes"


FAMILIES = {
    "qwen3": Family(read_dense, parsers=parsers),
    "qwen3_moe": Family(read_moe, inert=("max_window_layers", "layer_types"), parsers=parsers),
}
