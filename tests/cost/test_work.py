"""RankWork is counted from the model's own tensors and caches, and agrees with what others count."""

from __future__ import annotations

import pytest

from phalanx.cost.work import count_work
from phalanx.models import catalog
from phalanx.spec.layout import Layout

MODELS = ["Llama-3.3-70B", "Qwen3-235B-A22B", "gpt-oss-120b", "DeepSeek-R1", "Qwen3.5-397B-A17B"]


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_token_are_those_of_the_spec(name: str) -> None:
    spec = catalog.model(name)
    work = count_work(spec, 1, spec.number_format, "bf16")
    counted = work.linear_flops + work.expert_flops + work.head_flops
    assert counted == pytest.approx(spec.flops_per_token(0), rel=0.005)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_bytes_read_are_those_the_layout_holds_less_the_embedding(name: str, tp: int) -> None:
    spec = catalog.model(name)
    layout = Layout(spec, tp)
    work = count_work(spec, tp, spec.number_format, "bf16")
    read = work.linear_bytes + work.head_bytes + work.expert_bytes * work.experts * work.sparse_layers
    held = layout.weight_bytes(0, spec.number_format) - (0 if spec.tied_embeddings else work.head_bytes)
    assert read == pytest.approx(held, rel=0.002)


def test_more_ranks_read_less_each() -> None:
    spec = catalog.model("Llama-3.3-70B")
    sizes = [count_work(spec, tp, "bf16", "bf16").linear_bytes for tp in (1, 2, 4, 8)]
    assert sizes == pytest.approx([sizes[0], sizes[0] / 2, sizes[0] / 4, sizes[0] / 8], rel=0.001)


def test_the_rank_with_the_most_counts() -> None:
    """8 KV heads over 3 ranks are 3 + 3 + 2: the step waits for a rank that reads three."""
    spec = catalog.model("Llama-3.3-70B")
    (_, whole), (_, shared) = (count_work(spec, tp, "bf16", "bf16").cache_bytes[0] for tp in (1, 3))
    assert shared == pytest.approx(whole * 3 / 8)


def test_experts_touched() -> None:
    work = count_work(catalog.model("Qwen3-235B-A22B"), 1, "fp8", "bf16")
    assert work.experts_touched(1) == pytest.approx(8)
    assert work.experts_touched(2) == pytest.approx(16 - 64 / 128)
    assert work.experts_touched(10_000) == pytest.approx(128)
    assert count_work(catalog.model("Llama-3.1-8B"), 1, "bf16", "bf16").experts_touched(64) == 0


@pytest.mark.parametrize(
    ("name", "tp", "cached"),
    [
        ("Llama-3.3-70B", 1, {None: 327_680}),
        ("Llama-3.3-70B", 8, {None: 40_960}),
        ("gpt-oss-120b", 1, {None: 36_864, 128: 36_864}),
        ("DeepSeek-R1", 8, {None: 70_272}),
        ("Qwen3.5-397B-A17B", 1, {None: 30_720}),
    ],
)
def test_published_cache_bytes_of_a_token(name: str, tp: int, cached: dict[int | None, int]) -> None:
    work = count_work(catalog.model(name), tp, "bf16", "bf16")
    assert dict(work.cache_bytes) == cached


def test_fp8_keys_and_values_take_half() -> None:
    spec = catalog.model("Llama-3.1-8B")
    assert (
        count_work(spec, 1, "bf16", "fp8").cache_bytes[0][1] * 2
        == count_work(spec, 1, "bf16", "bf16").cache_bytes[0][1]
    )


def test_floats_of_four_bits_are_multiplied_as_such_and_integers_are_widened() -> None:
    work = count_work(catalog.model("gpt-oss-120b"), 1, "mxfp4", "bf16")
    assert (work.compute, work.expert_compute) == ("bf16", "mxfp4")
    assert count_work(catalog.model("Llama-3.1-8B"), 1, "nvfp4", "bf16").compute == "fp4"
    assert count_work(catalog.model("Llama-3.1-8B"), 1, "awq", "bf16").compute == "bf16"
    assert count_work(catalog.model("Llama-3.1-8B"), 1, "fp8", "bf16").compute == "fp8"
