"""What `h200.py` compares: the models, vLLM's figures for them, and the goals."""

from __future__ import annotations

from typing import Any

MIX = "256xmix"

_LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
_QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _model(family: dict[str, Any], layers: int, hidden: int, ffn: int, heads: tuple[int, int], **more: Any) -> Any:
    """The fields of a config.json."""
    query, key_value = heads
    return family | {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "head_dim": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


_LLAMA_8B = _model(_LLAMA, 32, 4096, 14336, (32, 8), vocab_size=128256)
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_WIDE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _model({"model_type": "gpt_oss"}, layers, 2880, 2880, (64, 8), vocab_size=201088) | {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": rope | {"original_max_position_embeddings": 4096},
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _WIDE},
    }


def _latent(kind: str, layers: int, hidden: int, ffn: int, expert: int, heads: int, **more: Any) -> dict[str, Any]:
    family = {"model_type": kind, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_shared_experts": 1}
    routing = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    whole = _model(family | routing, layers, hidden, ffn, (heads, heads), moe_intermediate_size=expert, **more)
    return {name: value for name, value in whole.items() if name != "head_dim"}


_GLM_4_7_FLASH = _latent(
    "glm4_moe_lite", 47, 2048, 10240, 1536, 20, vocab_size=154880, q_lora_rank=768, qk_nope_head_dim=192,
    v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=1.8,
    first_k_dense_replace=1, max_position_embeddings=202752, rms_norm_eps=1e-5, rope_theta=1000000,
)  # fmt: skip
_DEEPSEEK_ROPE = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK_V3_RANK = _latent(
    "deepseek_v3", 61, 7168, 18432 // 8, 2048 // 8, 128 // 8, vocab_size=129280 // 8, q_lora_rank=1536,
    qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
    routed_scaling_factor=2.5, first_k_dense_replace=3, max_position_embeddings=163840, rms_norm_eps=1e-6,
    rope_theta=10000, rope_scaling=_DEEPSEEK_ROPE | {"original_max_position_embeddings": 4096},
    quantization_config=_FP8,
)  # fmt: skip
_QWEN3_5 = {
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "quantization_config": _FP8,
}


def _qwen3_5(layers: int, hidden: int, ffn: int, heads: tuple[int, int], value_heads: int, **more: Any) -> Any:
    nets = {"head_dim": 256, "linear_num_value_heads": value_heads}
    return _model(_QWEN3_5, layers, hidden, ffn, heads) | nets | more


_SHARED_EXPERT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _model(_QWEN3, 28, 1024, 3072, (16, 8), vocab_size=151936, tie_word_embeddings=True),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-8b-fp8": _LLAMA_8B | {"quantization_config": _FP8},
    "qwen3-30b-a3b-fp8": _model(_QWEN3, 48, 2048, 6144, (32, 4), vocab_size=151936, quantization_config=_FP8)
    | {"model_type": "qwen3_moe", **_EXPERTS},
    "llama-3.3-70b-tp4-shard": _model(_LLAMA, 80, 8192, 7168, (16, 2), vocab_size=32064),
    "llama-3.3-70b-awq": _model(_LLAMA, 80, 8192, 28672, (64, 8), vocab_size=128256, quantization_config=_AWQ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.7-flash": _GLM_4_7_FLASH,
    "deepseek-v3-fp8-tp8-rank": _DEEPSEEK_V3_RANK,
    "qwen3.5-35b-a3b-fp8": _qwen3_5(40, 2048, 512, (16, 2), 32, model_type="qwen3_5_moe_text", **_SHARED_EXPERT)
    | {"num_experts": 256, "num_experts_per_tok": 8},
    "qwen3.5-27b-fp8": _qwen3_5(64, 5120, 17408, (24, 4), 48, model_type="qwen3_5_text"),
}
"""`tp4-shard` and `tp8-rank` are what one rank of four, or eight, computes, written as a model of its own."""

VLLM: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-0.6b", "1x128x256"): {"tpot_ms": 1.889, "prefill_tok_s": 15545},
    ("qwen3-0.6b", "32x1024x256"): {"tpot_ms": 2.780, "prefill_tok_s": 406050},
    ("qwen3-0.6b", "128x1024x256"): {"tpot_ms": 6.055, "prefill_tok_s": 402933},
    ("qwen3-0.6b", MIX): {"out_tok_s": 23665},
    ("llama-3.1-8b", "1x128x256"): {"tpot_ms": 5.101, "prefill_tok_s": 12224},
    ("llama-3.1-8b", "32x1024x256"): {"tpot_ms": 6.530, "prefill_tok_s": 43820},
    ("llama-3.1-8b", "128x1024x256"): {"tpot_ms": 11.100, "prefill_tok_s": 42935},
    ("llama-3.1-8b", MIX): {"out_tok_s": 10053},
    ("llama-3.1-8b-fp8", "1x128x256"): {"tpot_ms": 3.635, "prefill_tok_s": 17170},
    ("llama-3.1-8b-fp8", "32x1024x256"): {"tpot_ms": 5.176, "prefill_tok_s": 65356},
    ("llama-3.1-8b-fp8", "128x1024x256"): {"tpot_ms": 9.609, "prefill_tok_s": 63649},
    ("llama-3.1-8b-fp8", MIX): {"out_tok_s": 12642},
    ("qwen3-30b-a3b-fp8", "1x128x256"): {"tpot_ms": 4.461, "prefill_tok_s": 11180},
    ("qwen3-30b-a3b-fp8", "32x1024x256"): {"tpot_ms": 6.183, "prefill_tok_s": 72779},
    ("qwen3-30b-a3b-fp8", "128x1024x256"): {"tpot_ms": 10.690, "prefill_tok_s": 74405},
    ("qwen3-30b-a3b-fp8", MIX): {"out_tok_s": 11792},
    ("llama-3.3-70b-tp4-shard", "1x128x256"): {"tpot_ms": 11.537, "prefill_tok_s": 6957},
    ("llama-3.3-70b-tp4-shard", "32x1024x256"): {"tpot_ms": 12.303, "prefill_tok_s": 17938},
}
"""vLLM 0.24.0 on one H200 with its defaults, random weights, prefix cache off, the better of two runs (2026-11-15)."""

GOALS = {
    ("llama-3.1-8b", "1x128x256"): 4.2,
    ("llama-3.1-8b", "32x1024x256"): 6.0,
    ("llama-3.1-8b", "128x1024x256"): 10.5,
    ("llama-3.1-8b", MIX): 10_500,
    ("llama-3.3-70b-tp4-shard", "1x128x256"): 9.8,
    ("llama-3.3-70b-tp4-shard", "32x1024x256"): 10.8,
    ("llama-3.1-8b-fp8", "1x128x256"): 2.9,
    ("llama-3.1-8b-fp8", "32x1024x256"): 4.6,
    ("llama-3.1-8b-fp8", MIX): 13_000,
    ("qwen3-30b-a3b-fp8", "1x128x256"): 3.0,
    ("qwen3-30b-a3b-fp8", "32x1024x256"): 5.5,
    ("qwen3-30b-a3b-fp8", "128x1024x256"): 9.8,
    ("qwen3-30b-a3b-fp8", MIX): 12_500,
    ("qwen3-0.6b", "1x128x256"): 1.2,
    ("qwen3-0.6b", MIX): 28_000,
    ("llama-3.3-70b-awq", "1x128x256"): 10.2,
    ("llama-3.3-70b-awq", "32x1024x256"): 13.5,
    ("llama-3.3-70b-awq", "128x1024x256"): 24.0,
    ("gpt-oss-20b", "1x128x256"): 1.2,
    ("gpt-oss-20b", "32x1024x256"): 3.8,
    ("gpt-oss-20b", "128x1024x256"): 5.0,
    ("gpt-oss-120b", "1x128x256"): 2.0,
    ("gpt-oss-120b", "32x1024x256"): 12.3,
    ("gpt-oss-120b", "128x1024x256"): 19.8,
    ("glm-4.7-flash", "1x128x256"): 2.8,
    ("glm-4.7-flash", "32x1024x256"): 15.6,
    ("glm-4.7-flash", "128x1024x256"): 19.5,
    ("qwen3.5-35b-a3b-fp8", "1x128x256"): 1.9,
    ("qwen3.5-35b-a3b-fp8", "32x1024x256"): 7.4,
    ("qwen3.5-35b-a3b-fp8", "128x1024x256"): 13.2,
    ("qwen3.5-27b-fp8", "1x128x256"): 7.1,
    ("qwen3.5-27b-fp8", "32x1024x256"): 9.4,
    ("qwen3.5-27b-fp8", "128x1024x256"): 15.8,
}
"""TPOT in ms at most, or output tokens a second at least."""
