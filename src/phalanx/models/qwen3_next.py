"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate in every fourth layer."""

from __future__ import annotations

from phalanx.errors import ModelError
from phalanx.models import qwen3
from phalanx.models.family import Family, attention, attention_biases, decoder, refuse_unless, sparse_layers
from phalanx.models.fields import Config, count, each_layer, layer_count
from phalanx.models.ropes import read_rope, scaling_of
from phalanx.spec.attention import Gqa
from phalanx.spec.delta import DeltaNet
from phalanx.spec.draft_head import DraftHead, HeadNames
from phalanx.spec.ffn import Dense, ExpertNames, Fused, Moe, Router
from phalanx.spec.layer import Layer, Mixer, Norms
from phalanx.spec.model import ModelSpec

NORMS = Norms(plus=1.0)
HEAD_DIM = 256
HEAD_NAMES = HeadNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", ("fc",), "norm")
NAMES = ExpertNames(shared="shared_expert")


def read(config: Config) -> ModelSpec:
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "attn_output_gate", True)
    mixers: dict[str, Mixer] = {"linear_attention": _delta(config), "full_attention": _attention(config)}
    kinds = _kinds(config)
    if "full_attention" not in kinds:
        raise ModelError(
            "bad_config",
            "None of the layers attends.",
            "layer_types must name full_attention for one of them at least.",
        )
    return decoder(
        config,
        [Layer(mixers[kind], ffn, NORMS) for kind, ffn in zip(kinds, _ffns(config), strict=True)],
        prefixes=(("model.", "model.language_model."),),
        head=_head(config, mixers["full_attention"]),
        ignored=(r"mtp\..*", r"model\.visual\..*"),
    )


def _head(config: Config, mixer: Mixer) -> DraftHead | None:
    """A configuration may leave out that there is one. Its layer attends, and has experts where the others do."""
    if config.get("mtp_num_hidden_layers") == 0 or config.get("mtp_use_dedicated_embeddings"):
        return None
    return DraftHead(Layer(mixer, _ffns(config)[-1], NORMS), "mtp.", "mtp.layers.0.", HEAD_NAMES)


def _kinds(config: Config) -> list[str]:
    layers, every = layer_count(config), count(config, "full_attention_interval", default=4)
    meant = ["linear_attention" if number % every else "full_attention" for number in range(1, layers + 1)]
    return (each_layer(config, "layer_types") or meant)[:layers]


def _delta(config: Config) -> DeltaNet:
    k_heads, v_heads = count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")
    if v_heads % k_heads:
        raise ModelError(
            "bad_heads",
            f"{v_heads} value heads do not share {k_heads} key heads evenly.",
            "linear_num_value_heads must be a multiple of linear_num_key_heads.",
        )
    return DeltaNet(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=count(config, "linear_key_head_dim"),
        v_dim=count(config, "linear_value_head_dim"),
        kernel=count(config, "linear_conv_kernel_dim", default=4),
        grouped=config["model_type"] == "qwen3_next",
    )


def _attention(config: Config) -> Gqa:
    """A quarter of each head is turned, unless the configuration says otherwise."""
    turned = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.25)} | scaling_of(config)
    return attention(
        config,
        head_dim=HEAD_DIM,
        rope=read_rope(turned, config, count(config, "head_dim", default=HEAD_DIM), 10000.0),
        head_norm="each",
        norm_plus=1.0,
        gated=True,
        **attention_biases(config),
    )


def _ffns(config: Config) -> list[Dense | Moe]:
    if config["model_type"] in ("qwen3_5", "qwen3_5_text"):
        return [Dense(count(config, "intermediate_size"))] * layer_count(config)
    if config["model_type"] != "qwen3_next":
        refuse_unless(config, "norm_topk_prob", True)
    router = Router(
        count(config, "num_experts"),
        count(config, "num_experts_per_tok"),
        renormalise=bool(config.get("norm_topk_prob", True)),
    )
    moe = Moe(
        router,
        count(config, "moe_intermediate_size"),
        shared=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=NAMES,
        fused=Fused(),
    )
    dense = Dense(count(config, "intermediate_size", "moe_intermediate_size"))
    return [moe if sparse else dense for sparse in sparse_layers(config)]


_INERT = ("mrope_section", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def _qwen3_5_parsers(name: str) -> tuple[str | None, str | None]:
    return "qwen3", "qwen3_xml"


FAMILIES = {"qwen3_next": Family(read, inert=_INERT, parsers=qwen3.parsers)} | {
    name: Family(read, inert=_INERT, parsers=_qwen3_5_parsers)
    for name in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
}
