"""Gemma 3, its text model: norms on both sides of every part, windows with a rope of their own."""

from __future__ import annotations

import dataclasses

from phalanx.models.family import Family, activation, attention, attention_biases, decoder, refuse_unless, sliding
from phalanx.models.fields import Config, count, number
from phalanx.models.ropes import read_rope, rope, scaling_of
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.model import ModelSpec

NORMS = Norms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_ffn="pre_feedforward_layernorm",
    after_ffn="post_feedforward_layernorm",
    plus=1.0,
)


def read(config: Config) -> ModelSpec:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        refuse_unless(config, name, False)
    scale = number(config, "query_pre_attn_scalar", 256, least=0) ** -0.5
    head_dim = count(config, "head_dim", default=256)
    far = rope(config, head_dim, 1e6, "full_attention")
    theta = number(config, "rope_local_base_freq", 1e4)
    told = scaling_of(config, "sliding_attention") if "rope_parameters" in config else {"rope_theta": theta}
    near = read_rope(told, config, head_dim, theta)
    mixer = attention(
        config, head_dim=256, rope=far, scale=scale, head_norm="each", norm_plus=1.0, **attention_biases(config)
    )
    ffn = Dense(count(config, "intermediate_size"), activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    every = count(config, "sliding_window_pattern", "_sliding_window_pattern", default=6)
    windows = sliding(config, count(config, "sliding_window", default=4096), lambda layer: (layer + 1) % every != 0)
    mixers = [dataclasses.replace(mixer, window=window, rope=near if window else far) for window in windows]
    return decoder(
        config,
        [Layer(each, ffn, NORMS) for each in mixers],
        tied_embeddings=True,
        embedding_scale=count(config, "hidden_size") ** 0.5,
        prefixes=(("model.", "language_model.model."), ("model.", "model.language_model.")),
        ignored=("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
    )


_INERT = (
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "vision_config",
    "cache_implementation",
)
FAMILIES = {name: Family(read, inert=_INERT) for name in ("gemma3", "gemma3_text")}
