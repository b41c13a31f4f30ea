"""Models that are planned but not run: they weigh what transformers builds, keep what is published, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from phalanx.engine import defaults
from phalanx.errors import LayoutError, ModelError
from phalanx.models import catalog, read_config
from phalanx.models.config import describe
from phalanx.models.registry import families, served
from phalanx.spec import Layout
from phalanx.spec.cache import BLOCK_SIZE

Config = dict[str, Any]

TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 56,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MLA: Config = {
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INDEXER: Config = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
DELTA: Config = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHARED: Config = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4}
GLM: Config = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
V4: Config = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 4,
    "o_lora_rank": 6,
    "moe_intermediate_size": 24,
    "intermediate_size": 24,
    "n_routed_experts": 4,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
} | INDEXER
TINY_MODELS = [
    {"model_type": "mistral"},
    {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16},
    {"model_type": "llama4_text", "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128},
    {"model_type": "llama4_text", "num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 128},
    {"model_type": "glm4_moe"} | GLM,
    {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True} | GLM,
    {"model_type": "glm4_moe", "n_shared_experts": 2, "first_k_dense_replace": 3} | GLM | {"n_shared_experts": 2},
    {"model_type": "minimax_m2", "num_local_experts": 4, "head_dim": 16},
    {"model_type": "qwen3_next"} | DELTA | SHARED,
    {"model_type": "qwen3_5_text"} | DELTA,
    {"model_type": "qwen3_5_moe_text"} | DELTA | SHARED,
    {"model_type": "deepseek_v3"} | MLA,
    {"model_type": "deepseek_v3"} | MLA | {"q_lora_rank": None, "n_shared_experts": 2},
    {"model_type": "deepseek_v32"} | MLA | INDEXER,
    {"model_type": "glm_moe_dsa"} | MLA | INDEXER,
    {"model_type": "glm4_moe_lite"} | MLA,
    {"model_type": "deepseek_v4"} | V4,
    {"model_type": "deepseek_v4"} | V4 | {"compress_ratios": None, "num_hash_layers": None, "hc_mult": 2},
]
FLAGSHIPS = [
    "Qwen3-Next-80B-A3B",
    "Qwen3.5-397B-A17B",
    "Qwen3.5-27B",
    "gpt-oss-120b",
    "DeepSeek-V3",
    "DeepSeek-V3.2",
    "DeepSeek-V4-Flash",
    "DeepSeek-V4-Pro",
    "GLM-5",
    "GLM-5.2",
    "GLM-4.6",
    "GLM-4.5-Air",
    "GLM-4.7-Flash",
    "MiniMax-M2",
    "Llama-4-Maverick",
    "Mistral-Small-24B",
]


def stored_elements(config: Config) -> int:
    """Elements of a checkpoint of the model that transformers builds: parameters and persistent buffers."""
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**bare))
    return sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize("family", TINY_MODELS, ids=lambda family: family["model_type"])
def test_a_tiny_model_has_the_weights_transformers_builds(family: Config) -> None:
    config = TINY | family
    assert describe(config).parameters == stored_elements(config)


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_a_flagship_has_the_weights_transformers_builds(name: str) -> None:
    entry = catalog.entries()[name]
    assert entry.spec.parameters == stored_elements(dict(entry.config))


@pytest.mark.parametrize(
    ("name", "growing", "kinds"),
    [
        ("DeepSeek-V3", 70_272, {"latent": 61}),
        ("DeepSeek-V3.2", 85_888, {"latent": 61}),
        ("GLM-5", 89_856 + 19_968, {"latent": 78}),
        ("GLM-5.2", 89_856 + 21 * 256, {"latent": 78}),
        ("DeepSeek-V4-Flash", 2 * (21 * (512 + 128) // 4 + 20 * 512 // 16), {"latent": 41, "sliding": 2}),
        ("DeepSeek-V4-Pro", 2 * (30 * (512 + 128) // 4 + 31 * 512 // 16), {"latent": 61}),
        ("Kimi-K2", 70_272, {"latent": 61}),
        ("Qwen3.5-397B-A17B", 30_720, {"state": 45, "full": 15}),
        ("Qwen3-Next-80B-A3B", 24_576, {"state": 36, "full": 12}),
        ("gpt-oss-120b", 36_864, {"sliding": 18, "full": 18}),
        ("Llama-4-Maverick", 49_152, {"chunked": 36, "full": 12}),
        ("GLM-4.6", 376_832, {"full": 92}),
        ("MiniMax-M2", 253_952, {"full": 62}),
    ],
)
def test_what_a_long_sequence_grows_by_and_which_layers_keep_it(name: str, growing: int, kinds: dict[str, int]) -> None:
    spec = catalog.model(name)
    assert spec.cache_bytes(100_001) - spec.cache_bytes(100_000) == growing
    assert {kind: sum(cache.kind == kind for cache in spec.caches) for kind in kinds} == kinds
    assert sum(kinds.values()) == len(spec.layers)


def test_windows_stop_growing_and_states_do_not_depend_on_length() -> None:
    oss, qwen, maverick = (catalog.model(name) for name in ("gpt-oss-120b", "Qwen3.5-397B-A17B", "Llama-4-Maverick"))
    assert oss.cache_bytes(128) == 128 * 73_728
    assert oss.cache_bytes(1128) == 128 * 73_728 + 1000 * 36_864
    assert qwen.cache_bytes(0) / 2**20 == pytest.approx(184.2, abs=0.05)
    assert maverick.cache_bytes(8192) == 8192 * 196_608
    assert maverick.cache_bytes(9192) == 8192 * 196_608 + 1000 * 49_152


def test_compressed_attention_keeps_entries_and_what_is_in_reach() -> None:
    """Of V4-Flash 43 windows, and values and gates of 8 tokens for each of 21 layers and of 128 for each of 20."""
    assert BLOCK_SIZE == defaults.BLOCK_SIZE
    flash = catalog.model("DeepSeek-V4-Flash")
    rings = 43 * 128 * 512 + 21 * 8 * 2 * 2 * (512 + 128) + 20 * 128 * 2 * 512
    assert flash.cache_bytes(0) == 2 * rings
    assert flash.kv_bytes_per_token() == 8000
    assert flash.has_states
    assert (flash.state_heads, flash.recurrent_bytes) == (0, 0)
    layout = Layout(flash, 8)
    assert [sum(layout.cache_bytes(rank, 1000).values()) for rank in range(8)] == [flash.cache_bytes(1000)] * 8
    assert [sum(layout.state_bytes(cache, rank) for cache in flash.caches) for rank in range(8)] == [2 * rings] * 8


def test_a_latent_is_kept_whole_by_every_rank_and_a_state_is_dealt() -> None:
    deepseek, qwen = Layout(catalog.model("DeepSeek-V3"), 8), Layout(catalog.model("Qwen3.5-397B-A17B"), 8)
    assert [deepseek.cache_bytes(rank, 1000) for rank in range(8)] == [{"latent": 70_272_000}] * 8
    assert deepseek.kv_bytes_per_token(5, "fp8") == 35_136
    kept = qwen.cache_bytes(7, 1000)
    assert kept["full"] == 15_360_000
    assert kept["state"] / 2**20 == pytest.approx(23.03, abs=0.05)
    assert kept["state"] == qwen.cache_bytes(0, 0)["state"]


def test_heads_of_latent_attention_are_dealt_in_whole_blocks() -> None:
    layout = Layout(catalog.model("DeepSeek-V3"), 5)
    shares = [len(shard.query_heads) for shard in layout.shards]
    assert sum(shares) == 128
    assert all(share * 192 % 128 == 0 for share in shares)


def test_what_the_runtime_does_not_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families(), "llama9", families()["llama"]._replace(planned_only="nobody has tried"))
    with pytest.raises(ModelError, match="'llama9': nobody has tried") as refused:
        read_config(TINY | {"model_type": "llama9"})
    assert refused.value.code == "unsupported_architecture"
    assert all(name in refused.value.fix for name in served())
    assert "llama9" not in served()
    assert describe(TINY | {"model_type": "llama9"}).refusal is not None


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu_pytorch_tanh"),
        ("attn_output_gate", False),
        ("linear_num_value_heads", 6),
        ("layer_types", ["linear_attention"] * 4),
        ("layer_types", ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]),
        ("linear_bias", True),
    ],
)
def test_delta_nets_of_another_make_are_refused(family: str, field: str, value: object) -> None:
    dense = family in ("qwen3_5", "qwen3_5_text")
    config = TINY | DELTA | {"model_type": family} | ({"num_experts_per_tok": None} if dense else SHARED)
    assert read_config(config).state_heads == 4
    with pytest.raises(ModelError):
        read_config(config | {field: value})


@pytest.mark.parametrize("told", [{}, {"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_theta": 77.0}}])
def test_as_much_of_a_head_is_turned_as_transformers_turns(told: Config) -> None:
    config = TINY | DELTA | SHARED | {"model_type": "qwen3_next"} | told
    parameters = AutoConfig.for_model(**config).rope_parameters
    (rope,) = describe(config).ropes
    assert (rope.rotary_dim, rope.theta) == (16 * parameters["partial_rotary_factor"], parameters["rope_theta"])


def test_weights_of_experts_are_renormalised_as_the_family_does() -> None:
    config = TINY | DELTA | SHARED | {"norm_topk_prob": False}
    moe = read_config(config | {"model_type": "qwen3_next"}).moe
    assert moe is not None
    assert not moe.router.renormalise
    with pytest.raises(ModelError, match="norm_topk_prob"):
        read_config(config | {"model_type": "qwen3_5_moe_text"})


def test_more_ranks_than_key_heads_are_refused_with_the_largest_number_that_works() -> None:
    spec = describe(TINY | DELTA | SHARED | {"model_type": "qwen3_next", "num_attention_heads": 8})
    assert [len(shard.state_heads) for shard in Layout(spec, 4).shards] == [1] * 4
    with pytest.raises(LayoutError, match="4 key heads of delta nets") as refused:
        Layout(spec, 5)
    assert refused.value.fix == "Use TP <= 4."


def test_modules_left_out_of_fp8_are_known_under_the_hub_s_names() -> None:
    told = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    left_out = ["model.language_model.layers.0.linear_attn.in_proj_z"]
    config = TINY | DELTA | {"model_type": "qwen3_5_text"}
    spec = describe(config | {"quantization_config": told | {"modules_to_not_convert": left_out}})
    quantised = {
        layer: spec.is_quantised(spec.tensors[f"model.layers.{layer}.linear_attn.in_proj_z.weight"]) for layer in (0, 1)
    }
    assert quantised == {0: False, 1: True}


def test_a_served_family_in_a_format_the_runtime_cannot_read_is_planned_but_refused() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    config = TINY | {"model_type": "mixtral", "num_local_experts": 4, "quantization_config": awq}
    spec = describe(config)
    assert (spec.number_format, spec.quantization.format.unit) == ("awq", 32)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="'awq'"):
        read_config(config)


def test_the_language_model_of_a_model_with_eyes_is_read() -> None:
    text = {"model_type": "llama4_text", "num_local_experts": 4} | TINY
    seeing = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 8}}
    assert describe(seeing).parameters == describe(text).parameters
    kimi = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"} | TINY | MLA}
    assert describe(kimi).latent


JUNK = (
    -1,
    0,
    "x",
    [],
    [1],
    {},
    {"a": 1},
    True,
    1.5,
    10**12,
    float("nan"),
    {"quant_method": "fp8", "weight_block_size": [0, 0]},
)


@pytest.mark.parametrize("family", TINY_MODELS, ids=lambda family: family["model_type"])
def test_a_configuration_with_nonsense_in_a_field_is_read_or_refused_but_never_breaks(family: Config) -> None:
    config = TINY | {"torch_dtype": "bfloat16"} | family
    lists = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types", "moe_layers", "mlp_only_layers"))
    others = dict.fromkeys(("quantization_config", "rope_theta", "rope_scaling", "sliding_window", "no_rope_layers"))
    for name in config | lists | others:
        for junk in JUNK:
            try:
                spec = describe(config | {name: junk})
            except ModelError:
                continue
            assert spec.parameters > 0


def test_a_misspelt_architecture_names_the_nearest() -> None:
    with pytest.raises(ModelError) as refused:
        describe(TINY | {"model_type": "deepseek_v33"})
    assert "The nearest is deepseek_v3" in refused.value.fix
