"""OLMo 2: norms behind the parts instead of before them, and over all queries or keys of a token."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, attention_biases, decoder
from phalanx.models.fields import Config, count, layer_count
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.model import ModelSpec

NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read(config: Config) -> ModelSpec:
    mixer = attention(config, head_norm="whole", **attention_biases(config))
    ffn = Dense(count(config, "intermediate_size"), activation(config))
    return decoder(config, [Layer(mixer, ffn, NORMS)] * layer_count(config), norm_eps=1e-5)


FAMILIES = {"olmo2": Family(read)}
