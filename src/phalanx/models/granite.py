"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, attention_biases, decoder
from phalanx.models.fields import Config, count, layer_count, number
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    mixer = attention(config, scale=number(config, "attention_multiplier", 1.0), **attention_biases(config))
    ffn = Dense(count(config, "intermediate_size"), activation(config), bias=bool(config.get("mlp_bias", False)))
    return decoder(
        config,
        [Layer(mixer, ffn)] * layer_count(config),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )


FAMILIES = {"granite": Family(read)}
