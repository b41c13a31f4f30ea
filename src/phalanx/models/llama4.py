"""Llama 4, its text model: attention in chunks, layers without positions, sigmoid on what an expert takes."""

from __future__ import annotations

import dataclasses

from phalanx.models.family import Family, activation, attention, attention_biases, decoder
from phalanx.models.fields import Config, count, each_layer, layer_count, number, whole
from phalanx.spec.attention import Temperature
from phalanx.spec.ffn import Dense, ExpertNames, Fused, Moe, Router
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec

NAMES = ExpertNames("feed_forward", router="router", shared="shared_expert")


def read(config: Config) -> ModelSpec:
    layers = range(layer_count(config))
    every = count(config, "no_rope_layer_interval", default=4)
    turned = each_layer(config, "no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    kinds = each_layer(config, "layer_types") or ["chunked_attention" if each else "full_attention" for each in turned]
    tuned = Temperature(number(config, "attn_scale", 0.1), count(config, "floor_scale", default=8192))
    near = attention(
        config,
        head_dim=128,
        theta=500000.0,
        interleaved=True,
        head_norm="after_rope" if config.get("use_qk_norm", True) else None,
        **attention_biases(config),
    )
    far = dataclasses.replace(
        near,
        rope=None,
        head_norm=None,
        temperature=tuned if config.get("attn_temperature_tuning", True) else None,
    )
    chunk = whole(config, "attention_chunk_size") or None
    ffns = _ffns(config)
    return decoder(
        config,
        [
            Layer(
                dataclasses.replace(
                    near if turned[layer] else far,
                    window=chunk if kinds[layer] == "chunked_attention" else None,
                    chunked=kinds[layer] == "chunked_attention",
                ),
                ffns[layer],
            )
            for layer in layers
        ],
        norm_eps=1e-5,
        prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        ignored=("vision_model.*", "multi_modal_projector.*"),
    )


def _ffns(config: Config) -> list[Dense | Moe]:
    layers, step = range(layer_count(config)), count(config, "interleave_moe_layer_step", default=1)
    inner = count(config, "intermediate_size")
    sparse = config.get("moe_layers") or range(step - 1, len(layers), step)
    router = Router(
        count(config, "num_local_experts"),
        count(config, "num_experts_per_tok", default=1),
        score="sigmoid",
        weighs_input=True,
    )
    fused = Fused(transposed=True)
    moe = Moe(router, inner, activation(config), shared=inner, names=NAMES, fused=fused)
    width = count(config, "intermediate_size_mlp", default=inner)
    dense = Dense(width, activation(config), module="feed_forward")
    return [moe if layer in sparse else dense for layer in layers]


FAMILIES = {
    name: Family(read, inert=("for_llm_compressor",), parsers=lambda name: (None, "llama4_pythonic"))
    for name in ("llama4", "llama4_text")
}
