"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate in every fourth layer."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, decoder, sparse_layers
from phalanx.models.fields import Config, count, each_layer, layer_count
from phalanx.spec.delta import DeltaNet
from phalanx.spec.ffn import Dense, ExpertNames, Fused, Moe, Router
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.model import ModelSpec

NORMS = Norms(plus=1.0)
NAMES = ExpertNames(shared="shared_expert")


def read(config: Config) -> ModelSpec:
    layers = range(layer_count(config))
    every = count(config, "full_attention_interval", default=4)
    kinds = each_layer(config, "layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in layers
    ]
    delta = DeltaNet(
        k_heads=count(config, "linear_num_key_heads"),
        v_heads=count(config, "linear_num_value_heads"),
        k_dim=count(config, "linear_key_head_dim"),
        v_dim=count(config, "linear_value_head_dim"),
        kernel=count(config, "linear_conv_kernel_dim", default=4),
        grouped=config["model_type"] == "qwen3_next",
    )
    attends = attention(
        config,
        head_dim=256,
        head_norm="each",
        norm_plus=1.0,
        gated=True,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=bool(config.get("attention_bias", False)),
    )
    mixers = [delta if kinds[layer] == "linear_attention" else attends for layer in layers]
    return decoder(
        config,
        [Layer(mixer, ffn, NORMS) for mixer, ffn in zip(mixers, _ffns(config), strict=True)],
        prefixes=(("model.", "model.language_model."),),
        ignored=(r"mtp\..*", r"model\.visual\..*"),
    )


def _ffns(config: Config) -> list[Dense | Moe]:
    if "num_experts" not in config:
        return [Dense(count(config, "intermediate_size"), activation(config))] * layer_count(config)
    router = Router(
        count(config, "num_experts"),
        count(config, "num_experts_per_tok"),
        renormalise=bool(config.get("norm_topk_prob", True)),
    )
    moe = Moe(
        router,
        count(config, "moe_intermediate_size"),
        activation(config),
        shared=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=NAMES,
        fused=Fused(),
    )
    dense = Dense(count(config, "intermediate_size", "moe_intermediate_size"), activation(config))
    return [moe if sparse else dense for sparse in sparse_layers(config)]


_LATER = "recurrent states are planned for, not run yet"
_INERT = ("mrope_section", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
FAMILIES = {
    name: Family(read, _LATER, _INERT)
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
}
