"""What cannot be served is refused with a code, what was found and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import ModelError
from phalanx.models import read_config
from tests.models.test_config import LLAMA3, TINY, Config

MOE = TINY | {"num_experts_per_tok": 2}
QWEN3_MOE = MOE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}
MIXTRAL = MOE | {"model_type": "mixtral", "num_local_experts": 4}
MINIMAX_M2 = MIXTRAL | {"model_type": "minimax_m2"}
DEEPSEEK_V3 = TINY | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_n_heads": 4, "index_head_dim": 16, "index_topk": 5}
DEEPSEEK_V4 = TINY | {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 20,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 5,
}


def refusal(config: Config | str | Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_config(config)
    return caught.value


def without(config: Config, name: str) -> Config:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize("config", [MINIMAX_M2, DEEPSEEK_V3, DEEPSEEK_V32, DEEPSEEK_V4])
def test_what_is_changed_below_is_read_as_it_is(config: Config) -> None:
    assert read_config(config).model_type == config["model_type"]


@pytest.mark.parametrize(
    ("config", "code", "named"),
    [
        (TINY | {"model_type": "gpt2"}, "unknown_architecture", "'gpt2'"),
        (without(TINY, "model_type"), "unknown_architecture", "None"),
        (TINY | {"hidden_act": "gelu"}, "unsupported_activation", "'gelu'"),
        (TINY | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "bad_config", "short_factor has 0 numbers"),
        (TINY | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "unsupported_rope", "'dynamic'"),
        (
            TINY | {"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": True}},
            "unsupported_quantization",
            "desc_act is true",
        ),
        (TINY | {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "unsupported_quantization", "'e5m2'"),
        (
            TINY | {"quantization_config": {"quant_method": "gptq", "bits": 4, "format": "marlin"}},
            "unsupported_quantization",
            "'marlin'",
        ),
        (
            TINY | {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:*.lm_head"]}},
            "bad_config",
            "'re:*.lm_head', which is no pattern: nothing to repeat",
        ),
        (TINY | {"quantization_config": {"quant_method": "fp8", "ignored_layers": [None]}}, "bad_config", "None"),
        (
            TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "bad_config",
            "a token goes to 5 of 4 experts",
        ),
        (DEEPSEEK_V3 | {"n_routed_experts": 8}, "bad_config", "8 experts do not make 8 groups of two or more"),
        (MIXTRAL | {"num_local_experts": 10**9}, "bad_config", "1000000000 experts"),
        (DEEPSEEK_V3 | {"n_group": 3}, "bad_config", "16 experts do not make 3 groups"),
        (
            DEEPSEEK_V3 | {"num_experts_per_tok": 5, "topk_group": 2},
            "bad_config",
            "a token goes to 5 experts of 2 of 8 groups, each of 2",
        ),
        (DEEPSEEK_V3 | {"topk_group": 9}, "bad_config", "a token goes to 2 experts of 9 of 8 groups"),
        (MIXTRAL | {"sliding_window": -1}, "bad_config", "sliding_window is -1"),
        (TINY | {"model_type": "mistral", "sliding_window": ["x"]}, "bad_config", "sliding_window is ['x']"),
        (TINY | {"model_type": "phi3", "sliding_window": 0.5}, "bad_config", "sliding_window is 0.5"),
        (TINY | {"torch_dtype": "float64"}, "bad_dtype", "'float64'"),
        (TINY | {"num_key_value_heads": 3}, "bad_heads", "4 query heads do not share 3 KV heads"),
        (TINY | {"num_hidden_layers": 0}, "bad_config", "num_hidden_layers is 0"),
        (TINY | {"vocab_size": "many"}, "bad_config", "vocab_size is 'many'"),
        (TINY | {"vocab_size": True}, "bad_config", "vocab_size is True"),
        (TINY | {"rms_norm_eps": float("nan")}, "bad_config", "rms_norm_eps is nan"),
        (TINY | {"rms_norm_eps": -1e-5}, "bad_config", "rms_norm_eps is -1e-05"),
        (
            TINY | {"model_type": "gemma3_text", "query_pre_attn_scalar": -16},
            "bad_config",
            "query_pre_attn_scalar is -16.0",
        ),
        (TINY | {"rope_theta": -10000.0}, "bad_config", "theta of rotary positions is -10000.0"),
        (TINY | {"rope_theta": float("inf")}, "bad_config", "theta of rotary positions is inf"),
        (
            TINY | {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
            "bad_config",
            "factor of rotary positions is 0.0",
        ),
        (TINY | {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, "bad_config", "positions is nan"),
        (
            TINY | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1}},
            "bad_config",
            "original_max_positions of rotary positions is -1",
        ),
        (
            TINY | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 10**30}},
            "bad_config",
            "original_max_positions of rotary positions is 1000",
        ),
        (TINY | {"rope_scaling": LLAMA3 | {"low_freq_factor": float("nan")}}, "bad_config", "positions is nan"),
        (
            TINY | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.0}},
            "bad_config",
            "attention_factor of rotary positions is 0.0",
        ),
        (TINY | {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "bad_config", "theta"),
        (
            TINY | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0]}},
            "bad_config",
            "a divisor of rotary positions is 0.0",
        ),
        (TINY | {"eos_token_id": [[]]}, "bad_config", "eos_token_id is [[]]"),
        (TINY | {"eos_token_id": "</s>"}, "bad_config", "eos_token_id is </s>"),
        (TINY | {"eos_token_id": [2, -1]}, "bad_config", "eos_token_id is [2, -1]"),
        (TINY | {"head_dim": 15}, "bad_config", "positions turn 16 numbers of a head of 15"),
        (TINY | {"partial_rotary_factor": 0.01}, "bad_config", "positions turn 0 numbers of a head of 16"),
        (TINY | {"partial_rotary_factor": -0.5}, "bad_config", "positions turn -8 numbers"),
        (TINY | {"partial_rotary_factor": 7}, "bad_config", "positions turn 112 numbers of a head of 16"),
        (MINIMAX_M2 | {"head_dim": 16, "rotary_dim": 64}, "bad_config", "positions turn 64 numbers of a head of 16"),
        (DEEPSEEK_V3 | {"partial_rotary_factor": 2}, "bad_config", "positions turn 16 numbers of a head of 8"),
        (DEEPSEEK_V32 | {"index_head_dim": 6}, "bad_config", "positions turn 8 numbers of a head of 6"),
        (DEEPSEEK_V4 | {"index_head_dim": 6}, "bad_config", "positions turn 8 numbers of a head of 6"),
        (DEEPSEEK_V4 | {"qk_rope_head_dim": 34}, "bad_config", "positions turn 34 numbers of a head of 32"),
        (DEEPSEEK_V4 | {"hc_eps": -1e-6}, "bad_config", "hc_eps is -1e-06"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(config: Config, code: str, named: str) -> None:
    error = refusal(config)
    assert error.code == code
    assert named in error.found
    assert error.fix
    assert error.to_dict() == {"code": code, "found": error.found, "fix": error.fix}
    assert str(error) == f"{error.found} {error.fix}"


@pytest.mark.parametrize(
    ("config", "name"),
    [(TINY, name) for name in TINY if name not in ("model_type", "num_key_value_heads")]
    + [(QWEN3_MOE, name) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")]
    + [(MIXTRAL, name) for name in ("num_local_experts", "num_experts_per_tok")],
)
def test_a_missing_field_is_named(config: Config, name: str) -> None:
    error = refusal(without(config, name))
    assert (error.code, error.found) == ("bad_config", f"The configuration has no {name}.")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_stretched_rope_without_its_factor_is_refused(kind: str) -> None:
    error = refusal(TINY | {"rope_scaling": {"rope_type": kind}})
    assert "factor" in error.found


@pytest.mark.parametrize("text", ["{not json", "", "[1, 2]", '"llama"'])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    error = refusal(file)
    assert error.code == "bad_config"
    assert str(file) in error.found


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert refusal(tmp_path).code == "bad_config"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert error.code == "no_config"
    assert str(tmp_path / "config.json") in error.found
    assert refusal(tmp_path / "elsewhere" / "config.json").code == "no_config"
