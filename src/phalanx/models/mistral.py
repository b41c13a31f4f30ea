"""Mistral: Llama with a window in every layer where one is given."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, decoder
from phalanx.models.fields import Config, count, layer_count, whole
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    mixer = attention(config, window=whole(config, "sliding_window") or None)
    ffn = Dense(count(config, "intermediate_size"), activation(config))
    return decoder(config, [Layer(mixer, ffn)] * layer_count(config))


FAMILIES = {"mistral": Family(read)}
