"""Qwen 2 and 2.5: biases on queries, keys and values; windows in the late layers where they are asked for."""

from __future__ import annotations

import dataclasses

from phalanx.models.family import Family, activation, attention, decoder, sliding
from phalanx.models.fields import Config, count
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def windows(config: Config) -> list[int | None]:
    told = count(config, "sliding_window", default=4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return sliding(config, told, lambda layer: layer >= first)


def read(config: Config) -> ModelSpec:
    mixer = attention(config, qkv_bias=True)
    ffn = Dense(count(config, "intermediate_size"), activation(config))
    return decoder(config, [Layer(dataclasses.replace(mixer, window=window), ffn) for window in windows(config)])


FAMILIES = {"qwen2": Family(read, parsers=lambda name: (None, "hermes"))}
