"""gpt-oss: attention with sinks, every other layer with a window; experts with biases and a clamped gate."""

from __future__ import annotations

import dataclasses

from phalanx.models.family import Family, attention, decoder, refuse_unless, sliding
from phalanx.models.fields import Config, count, number
from phalanx.spec.ffn import Activation, ExpertNames, Fused, Moe, Router
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    refuse_unless(config, "swiglu_alpha", 1.702)
    bias = bool(config.get("attention_bias", True))
    mixer = attention(config, head_dim=64, qkv_bias=bias, output_bias=bias, sinks=True)
    router = Router(
        count(config, "num_local_experts", "num_experts"),
        count(config, "num_experts_per_tok", "experts_per_token"),
        score="chosen_softmax",
        bias=True,
    )
    moe = Moe(
        router,
        count(config, "intermediate_size"),
        Activation("clamped", number(config, "swiglu_limit", 7.0)),
        bias=True,
        names=ExpertNames(router="router"),
        fused=Fused(transposed=True, interleaved=True, mxfp4=True),
    )
    windows = sliding(config, count(config, "sliding_window", default=128), lambda layer: layer % 2 == 0)
    layers = [Layer(dataclasses.replace(mixer, window=window), moe) for window in windows]
    return decoder(config, layers, norm_eps=1e-5)


FAMILIES = {"gpt_oss": Family(read, inert=("hidden_act", "initial_context_length", "experts_per_token"))}
