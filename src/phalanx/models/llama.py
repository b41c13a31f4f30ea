"""Llama 2 and 3, and what was made in their likeness."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, attention_biases, decoder, refuse_unless
from phalanx.models.fields import Config, count, layer_count
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    refuse_unless(config, "rope_interleaved", False)
    mixer = attention(config, **attention_biases(config))
    ffn = Dense(count(config, "intermediate_size"), activation(config), bias=bool(config.get("mlp_bias", False)))
    return decoder(config, [Layer(mixer, ffn)] * layer_count(config))


def parsers(name: str) -> tuple[str | None, str | None]:
    return None, "llama3_json" if "llama-3." in name or "llama3." in name else None


FAMILIES = {"llama": Family(read, inert=("is_llama_config", "transformers.js_config"), parsers=parsers)}
