"""GLM 4.5 to 4.7: grouped-query attention before experts in the manner of DeepSeek."""

from __future__ import annotations

from phalanx.models.deepseek import INERT, Habits, draft_head, ffns, speculative_layers
from phalanx.models.family import Family, attention, decoder
from phalanx.models.fields import Config
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec

HABITS = Habits(scaling=1.0, dense_layers=1)


def read(config: Config) -> ModelSpec:
    mixer = attention(
        config,
        qkv_bias=bool(config.get("attention_bias", False)),
        head_norm="each" if config.get("use_qk_norm") else None,
    )
    layers = [Layer(mixer, ffn) for ffn in ffns(config, HABITS)]
    head = draft_head(config, mixer, HABITS)
    return decoder(config, layers, norm_eps=HABITS.norm_eps, head=head, ignored=(speculative_layers(config),))


FAMILIES = {"glm4_moe": Family(read, inert=INERT)}
