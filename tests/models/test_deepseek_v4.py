"""DeepSeek V4's configurations, in DeepSeek's words and in those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from phalanx.errors import ModelError
from phalanx.models import catalog, read_config
from phalanx.spec import Compressed, Layout

PUBLISHED = dict(catalog.entries()["DeepSeek-V4-Flash"].config)
PLAIN = {key: value for key, value in PUBLISHED.items() if key not in ("quantization_config", "expert_dtype")}
"""Of a version in bf16."""


def test_both_ways_to_tell_a_configuration_mean_the_same() -> None:
    theirs = AutoConfig.for_model(**PLAIN).to_dict()
    assert "compress_ratios" not in theirs
    ours, told = read_config(PLAIN), read_config(theirs | {"eos_token_id": None, "bos_token_id": None})
    assert ours == told
    near, sparse, heavy = (layer.mixer for layer in ours.layers[1:4])
    assert isinstance(sparse, Compressed)
    assert (near.rope.theta, near.rope.kind, near.rope.rotary_dim) == (10000.0, "default", 64)  # type: ignore[union-attr]
    assert (sparse.rope.theta, sparse.rope.kind, sparse.rope.attention_factor) == (160000.0, "yarn", 1.0)
    assert sparse.rope == heavy.rope


@pytest.mark.parametrize(
    "change",
    [
        {"scoring_func": "softmax"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"norm_topk_prob": False},
        {"n_shared_experts": 2},
        {"num_key_value_heads": 8},
        {"hidden_act": "relu"},
        {"candidate_topk_blocks": 3},
        {"o_groups": 7},
        {"compress_ratios": [0, 8] * 30},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_would_change_the_arithmetic_is_refused_by_its_name(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refused:
        read_config(PLAIN | change)
    if "compress_ratios" not in change:
        assert next(iter(change)) in f"{refused.value.found} {refused.value.fix}"


def test_the_published_files_are_in_two_formats() -> None:
    spec = read_config(PUBLISHED)
    assert spec.number_format == "mxfp4"
    assert spec.weight_bytes(spec.number_format) / 1e9 == pytest.approx(156.1, abs=0.1)
    formats = {
        name.partition(".layers.3.")[2]: scheme.format.name
        for name, tensor in spec.tensors.items()
        if ".layers.3." in name and spec.is_quantised(tensor) and (scheme := spec.scheme_of(tensor))
    }
    assert (formats["self_attn.q_a_proj.weight"], formats["mlp.experts.7.up_proj.weight"]) == ("fp8", "mxfp4")
    assert formats["mlp.shared_experts.up_proj.weight"] == "fp8"
    assert not any("compressor" in name for name in formats)
    assert read_config(PLAIN | {"expert_dtype": "fp4"}).number_format == "bf16"
    only_fp8 = read_config(PLAIN | {"quantization_config": PUBLISHED["quantization_config"]})
    assert (only_fp8.number_format, Layout(spec, 2).block(expert=True)) == ("fp8", 32)


def test_decodes_read_a_window_the_chosen_entries_and_the_keys_of_all() -> None:
    near, sparse, heavy = (layer.mixer for layer in read_config(PLAIN).layers[1:4])

    def read(mixer: Any, context: int) -> float:
        return sum(each * min(context, positions or context) for positions, each in mixer.reads)

    assert read(near, 10_240) == 128 * 512
    assert read(heavy, 10_240) == 128 * 512 + 80 * 512
    assert read(sparse, 10_240) == 128 * 512 + 512 * 512 + 2560 * 128
