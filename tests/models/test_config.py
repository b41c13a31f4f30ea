"""A `config.json` of any age is read the same way, with the defaults of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phalanx.models import read_config
from phalanx.spec import Gqa, ModelSpec, Rope

Config = dict[str, Any]

TINY: Config = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 56,
    "max_position_embeddings": 4096,
}
QWEN2 = TINY | {"model_type": "qwen2"}
QWEN3 = TINY | {"model_type": "qwen3", "head_dim": 16}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def mixer(spec: ModelSpec, layer: int = 0) -> Gqa:
    found = spec.layers[layer].mixer
    assert isinstance(found, Gqa)
    return found


def rope_of(spec: ModelSpec) -> Rope:
    rope = mixer(spec).rope
    assert rope is not None
    return rope


def windows(spec: ModelSpec) -> list[int | None]:
    return [mixer(spec, layer).window for layer in range(len(spec.layers))]


def without(config: Config, name: str) -> Config:
    return {key: value for key, value in config.items() if key != name}


def test_a_dictionary_a_file_and_its_folder_give_the_same_spec(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    expected = read_config(TINY)
    assert read_config(file) == expected
    assert read_config(tmp_path) == expected
    assert read_config(str(tmp_path)) == expected


def test_the_numbers_of_the_config_become_the_spec(published: dict[str, Config]) -> None:
    spec = read_config(published["Qwen3-30B-A3B"])
    assert (spec.model_type, len(spec.layers), spec.hidden, spec.vocab) == ("qwen3_moe", 48, 2048, 151936)
    assert (spec.heads, spec.kv_heads, spec.query_group, spec.head_dim) == (32, 4, 8, 128)
    assert (spec.intermediate, spec.max_positions, spec.norm_eps, spec.dtype) == (0, 40960, 1e-6, "bf16")
    assert {(mixer(spec, layer).head_norm, mixer(spec, layer).qkv_bias) for layer in range(48)} == {("each", False)}
    assert not spec.tied_embeddings
    assert spec.quantization is None
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.experts_per_token, spec.moe.intermediate) == (128, 8, 768)
    assert spec.moe.router.renormalise
    assert len(spec.sparse) == 48


def test_qwen3_moe_renormalises_only_when_told_and_mixtral_always() -> None:
    told, untold, mixtral = (
        read_config(config).moe for config in (QWEN3_MOE | {"norm_topk_prob": True}, QWEN3_MOE, MIXTRAL)
    )
    assert told is not None
    assert untold is not None
    assert mixtral is not None
    assert (told.router.renormalise, untold.router.renormalise, mixtral.router.renormalise) == (True, False, True)


@pytest.mark.parametrize("config", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_either_name_of_the_number_of_experts_is_read(config: Config) -> None:
    bare = without(without(config, "num_experts"), "num_local_experts")
    assert read_config(bare | {"num_experts": 4}) == read_config(bare | {"num_local_experts": 4})


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("value", "short"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_either_name_of_the_dtype_is_read(name: str, value: str, short: str) -> None:
    assert read_config(TINY | {name: value}).dtype == short


@pytest.mark.parametrize(
    "scaling",
    [{}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN, YARN | {"attention_factor": 1.5, "beta_fast": 16.0}],
    ids=["default", "linear", "llama3", "yarn", "yarn-tuned"],
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_both_rope_spellings_are_read_alike(scaling: Config, theta: float) -> None:
    old = read_config(TINY | {"rope_theta": theta, "rope_scaling": scaling or None})
    new = read_config(TINY | {"rope_parameters": {"rope_theta": theta} | scaling})
    assert rope_of(old) == rope_of(new)
    assert rope_of(old).theta == theta
    assert rope_of(old).kind == scaling.get("rope_type", "default")


def test_the_oldest_rope_spelling_says_type() -> None:
    oldest = rope_of(read_config(TINY | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert oldest == rope_of(read_config(TINY | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    assert (oldest.kind, oldest.factor) == ("linear", 2.0)


def test_llama3_rope_keeps_its_four_numbers() -> None:
    rope = rope_of(read_config(TINY | {"rope_scaling": LLAMA3}))
    assert rope == Rope(
        theta=10000.0,
        rotary_dim=16,
        kind="llama3",
        factor=32.0,
        original_max_positions=1024,
        low_freq_factor=2.0,
        high_freq_factor=8.0,
    )


@pytest.mark.parametrize(
    "extra",
    [{}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"mscale": 1.0}, {"factor": 1.0}],
    ids=str,
)
def test_yarn_scales_attention_as_transformers_does(extra: Config) -> None:
    config = TINY | {"rope_theta": 10000.0, "rope_scaling": YARN | extra}
    _, reference = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config), device="cpu")
    assert rope_of(read_config(config)).attention_factor == pytest.approx(reference)


def test_yarn_ramp_has_the_defaults_of_the_paper() -> None:
    rope = rope_of(read_config(TINY | {"rope_scaling": YARN}))
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    tuned = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    rope = rope_of(read_config(TINY | {"rope_scaling": tuned}))
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)


def test_rope_may_turn_a_part_of_each_head() -> None:
    assert rope_of(read_config(TINY | {"partial_rotary_factor": 0.5})).rotary_dim == 8


@pytest.mark.parametrize(
    ("value", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ()), (0, (0,))], ids=["int", "list", "none", "zero"]
)
def test_end_tokens(value: int | list[int] | None, expected: tuple[int, ...]) -> None:
    assert read_config(TINY | {"eos_token_id": value}).eos_token_ids == expected


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_qwen_slides_only_when_told_and_only_in_the_late_layers(config: Config) -> None:
    window = {"sliding_window": 128, "max_window_layers": 3}
    assert windows(read_config(config | window)) == [None] * 4
    assert windows(read_config(config | window | {"use_sliding_window": False}))[3] is None
    spec = read_config(config | window | {"use_sliding_window": True})
    assert windows(spec) == [None, None, None, 128]


def test_layer_types_say_which_qwen_layers_slide() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    window = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0, "layer_types": kinds}
    assert windows(read_config(QWEN2 | window)) == [128, None, 128, None]


def test_mixtral_slides_in_every_layer_when_a_window_is_given() -> None:
    assert windows(read_config(MIXTRAL | {"sliding_window": 128})) == [128] * 4
    assert windows(read_config(MIXTRAL | {"sliding_window": None})) == [None] * 4


def test_qwen3_moe_slides_in_every_layer_when_told() -> None:
    assert windows(read_config(QWEN3_MOE | {"sliding_window": 128})) == [None] * 4
    told = QWEN3_MOE | {"sliding_window": 128, "use_sliding_window": True}
    assert windows(read_config(told)) == [128] * 4


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_block_fp8_is_read_with_what_it_leaves_alone(name: str, block_fp8: Config) -> None:
    spec = read_config(TINY | {"quantization_config": block_fp8 | {name: ["lm_head"]}})
    assert spec.quantization is not None
    assert (spec.quantization.format.tile, spec.quantization.skipped) == ((128, 128), ("lm_head",))


def read(spec: ModelSpec, reference: PreTrainedConfig, name: str) -> tuple[Any, Any]:
    """A value as Phalanx and as transformers read it."""
    match name:
        case "rms_norm_eps":
            return spec.norm_eps, reference.rms_norm_eps
        case "rope_theta":
            return rope_of(spec).theta, reference.rope_parameters["rope_theta"]
        case "sliding_window":
            return windows(spec)[0], reference.sliding_window
        case _:
            return getattr(spec, name), getattr(reference, name)


@pytest.mark.parametrize(
    ("config", "omitted"),
    [(config, name) for config in (TINY, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL) for name in ("rms_norm_eps", "rope_theta")]
    + [(TINY, "head_dim"), (without(QWEN3, "head_dim"), "head_dim")]
    + [(config | {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window") for config in (QWEN2, QWEN3)],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_an_omitted_field_has_the_value_transformers_gives_it(config: Config, omitted: str) -> None:
    assert omitted not in config
    ours, theirs = read(read_config(config), AutoConfig.for_model(**config), omitted)
    assert ours == theirs
