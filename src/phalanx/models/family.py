"""What the files of all families share: the parts of a configuration that most of them tell alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from phalanx.errors import ModelError
from phalanx.models.fields import Config, count, dtype, each_layer, layer_count, number, token_ids
from phalanx.models.quantization import quantization
from phalanx.models.ropes import rope
from phalanx.spec.attention import Gqa
from phalanx.spec.ffn import Activation
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


class Family(NamedTuple):
    """Reads the configurations of one model_type. `planned_only` says why the runtime does not serve it.

    `inert` are fields that a configuration of this family may have and that do not change what the model computes.
    `parsers` names the parsers for thoughts and for calls of tools, by a model's name in small letters.
    """

    read: Callable[[Config], ModelSpec]
    planned_only: str | None = None
    inert: tuple[str, ...] = ()
    parsers: Callable[[str], tuple[str | None, str | None]] = lambda name: (None, None)


ROTARY_TABLES = r".*rotary_emb\.inv_freq"
"""Old checkpoints keep what the configuration says anyway."""

_ACTIVATIONS = {"silu": Activation(), "gelu_pytorch_tanh": Activation("gelu")}


def decoder(config: Config, layers: Sequence[Layer], *, norm_eps: float = 1e-6, **more: Any) -> ModelSpec:
    """A model of these layers. `norm_eps` is what the family means where nothing is said."""
    ignored = (ROTARY_TABLES, *more.pop("ignored", ()))
    return ModelSpec(
        model_type=config["model_type"],
        layers=tuple(layers),
        hidden=count(config, "hidden_size"),
        vocab=count(config, "vocab_size"),
        norm_eps=number(config, "rms_norm_eps", norm_eps, least=0),
        tied_embeddings=bool(config.get("tie_word_embeddings", more.pop("tied_embeddings", False))),
        dtype=dtype(config),
        quantization=quantization(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config, "eos_token_id"),
        ignored=ignored,
        **{"max_positions": count(config, "max_position_embeddings")} | more,
    )


def attention(config: Config, *, head_dim: int | None = None, theta: float = 10000.0, **more: Any) -> Gqa:
    """Heads, rope and scale. `head_dim` and `theta` are what the family means where nothing is said."""
    heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    head_dim = count(config, "head_dim", default=head_dim or hidden // heads)
    if heads % kv_heads:
        raise ModelError(
            "bad_heads",
            f"{heads} query heads do not share {kv_heads} KV heads evenly.",
            "num_attention_heads must be a multiple of num_key_value_heads.",
        )
    if "rope" not in more:
        more["rope"] = rope(config, head_dim, theta)
    return Gqa(heads, kv_heads, head_dim, **{"scale": head_dim**-0.5} | more)


def attention_biases(config: Config) -> dict[str, bool]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> Activation:
    told = config.get(name, default)
    if told not in _ACTIVATIONS:
        raise ModelError(
            "unsupported_activation",
            f"The configuration says {name} {told!r}.",
            f"Phalanx runs {config['model_type']} models with {' or '.join(map(repr, _ACTIVATIONS))}.",
        )
    return _ACTIVATIONS[told]


def refuse_unless(config: Config, name: str, value: Any) -> None:
    """A field that other models of this kind have with another value, which the runtime does not compute."""
    if config.get(name, value) != value:
        raise ModelError(
            "unsupported_field",
            f"The configuration says {name} {config[name]!r}.",
            f"Phalanx runs {config['model_type']} models with {value!r} alone.",
        )


def sliding(config: Config, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
    """The window of every layer: by `layer_types` where the configuration has them, else as the family means it."""
    kinds = each_layer(config, "layer_types")
    layers = range(layer_count(config))
    slides = [kinds[layer] == "sliding_attention" if kinds else default(layer) for layer in layers]
    return [window if slide else None for slide in slides]


def sparse_layers(config: Config) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those listed as dense."""
    step, dense = count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layer_count(config))]
