"""MiniMax M2: norms over all queries or keys of a token, experts chosen by sigmoid."""

from __future__ import annotations

from phalanx.models.family import Family, activation, attention, decoder, refuse_unless
from phalanx.models.fields import Config, count, layer_count
from phalanx.models.mixtral import NAMES
from phalanx.models.ropes import rope
from phalanx.spec.ffn import Moe, Router
from phalanx.spec.layer import Layer
from phalanx.spec.model import ModelSpec


def read(config: Config) -> ModelSpec:
    refuse_unless(config, "use_qk_norm", True)
    refuse_unless(config, "qk_norm_type", "per_layer")
    refuse_unless(config, "use_routing_bias", True)
    refuse_unless(config, "scoring_func", "sigmoid")
    head_dim = count(config, "head_dim", default=128)
    turned = rope(config, count(config, "rotary_dim", default=head_dim))
    mixer = attention(config, head_dim=128, head_norm="whole", rope=turned)
    experts = count(config, "num_local_experts")
    router = Router(experts, count(config, "num_experts_per_tok"), "sigmoid", renormalise=True, correction=True)
    moe = Moe(router, count(config, "intermediate_size"), activation(config), names=NAMES)
    return decoder(config, [Layer(mixer, moe)] * layer_count(config), ignored=(r"mtp\..*",))


_INERT = (
    "attn_type_list",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
)
FAMILIES = {"minimax_m2": Family(read, inert=_INERT)}
