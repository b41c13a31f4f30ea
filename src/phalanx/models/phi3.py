"""Phi 3, 3.5 and 4: q, k and v in one tensor, gate and up in another."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, decoder, refuse_unless
from phalanx.models.fields import Config, count, layer_count, whole
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    """Long contexts need other rope factors than short ones, so answers would depend on how long they become: served up
    to where the short ones end.
    """
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "lm_head_bias", False)
    mixer = attention(config, window=whole(config, "sliding_window") or None, fused="qkv_proj")
    ffn = Dense(count(config, "intermediate_size"), activation(config), fused="gate_up_proj")
    positions = count(config, "max_position_embeddings")
    if mixer.rope is not None and mixer.rope.kind == "longrope":
        positions = min(positions, count(config, "original_max_position_embeddings", default=positions))
    return decoder(config, [Layer(mixer, ffn)] * layer_count(config), norm_eps=1e-5, max_positions=positions)


FAMILIES = {"phi3": Family(read, inert=("original_max_position_embeddings", "full_attn_mod", "interpolate_factor"))}
