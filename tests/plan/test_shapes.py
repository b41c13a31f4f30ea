"""Which TP degrees load, and what is said of the others; the cases are ones that people met."""

from __future__ import annotations

import pytest

from phalanx.models import catalog
from phalanx.plan.engines import ENGINES
from phalanx.plan.shapes import Shape, shape


def judged(model: str, number_format: str, tp: int, engine: str) -> Shape:
    return shape(catalog.model(model).in_format(number_format), tp, ENGINES[engine])


@pytest.mark.parametrize(("tp", "columns"), [(2, 14784), (4, 7392), (8, 3696)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_qwen_72b_in_block_fp8_is_refused_by_others_and_loaded_by_phalanx(engine: str, tp: int, columns: int) -> None:
    refused = judged("Qwen2.5-72B", "fp8", tp, engine)
    assert not refused.is_legal
    assert f"29568 columns over {tp} ranks are {columns}, no multiple of the 128-wide block" in refused.problems[0]
    assert refused.nearest == (1,)
    assert judged("Qwen2.5-72B", "fp8", tp, "phalanx").is_legal
    assert judged("Qwen2.5-72B", "bf16", tp, engine).is_legal
    assert judged("Qwen2.5-72B", "fp8-channel", tp, engine).is_legal


@pytest.mark.parametrize(
    ("model", "tp", "outcome"),
    [
        ("Qwen3-30B-A3B", 2, "loads"),
        ("Qwen3-30B-A3B", 4, "with whole experts"),
        ("Qwen3-30B-A3B", 8, "with whole experts"),
        ("Qwen3-235B-A22B", 4, "loads"),
        ("Qwen3-235B-A22B", 8, "with whole experts"),
        ("GLM-4.6", 4, "loads"),
        ("GLM-4.6", 8, "refused"),  # the shared expert is 192 columns a rank too
        ("Qwen3.5-397B-A17B", 8, "loads"),
        ("Qwen3.5-397B-A17B", 16, "refused"),
        ("DeepSeek-V3", 16, "loads"),
    ],
)
def test_experts_that_cut_a_block_load_only_whole(model: str, tp: int, outcome: str) -> None:
    found = judged(model, "fp8", tp, "vllm")
    assert found.is_legal == (outcome != "refused")
    assert found.expert_parallel == (outcome == "with whole experts")


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
def test_odd_degrees_work_with_phalanx_alone(tp: int) -> None:
    assert judged("Llama-3.3-70B", "bf16", tp, "phalanx").is_legal
    for engine in ("vllm", "sglang", "trtllm"):
        refused = judged("Llama-3.3-70B", "bf16", tp, engine)
        assert any(f"64 query heads do not divide by {tp}" in problem for problem in refused.problems)


@pytest.mark.parametrize(("tp", "nearest"), [(3, (2, 4)), (5, (4, 8)), (7, (4, 8)), (9, (8, 16))])
def test_the_nearest_legal_degrees_on_both_sides_are_named(tp: int, nearest: tuple[int, ...]) -> None:
    refused = judged("Llama-3.3-70B", "bf16", tp, "vllm")
    assert refused.nearest == nearest
    assert refused.fix == f"The nearest that works: TP={nearest[0]} or TP={nearest[1]}."


@pytest.mark.parametrize(
    ("model", "tp", "named"),
    [
        ("Llama-4-Maverick", 16, "40 query heads do not divide by 16"),
        ("Qwen3.5-27B", 16, "24 query heads do not divide by 16"),
        ("Qwen3.5-397B-A17B", 32, "16 delta-net key heads do not divide by 32"),
        ("Mixtral-8x22B", 12, "8 KV heads and 12 ranks do not divide each other"),
    ],
)
def test_what_does_not_divide_is_named_with_its_numbers(model: str, tp: int, named: str) -> None:
    assert named in judged(model, "bf16", tp, "vllm").problems


def test_kv_heads_may_be_copied_when_the_ranks_are_their_multiple() -> None:
    assert judged("Qwen3-235B-A22B", "bf16", 8, "vllm").is_legal
    assert judged("Qwen3.5-397B-A17B", "bf16", 8, "trtllm").is_legal


def test_more_ranks_than_heads_are_too_many_for_phalanx_too() -> None:
    refused = judged("SmolLM2-135M", "bf16", 10, "phalanx")
    assert "9 query heads" in refused.problems[0]
    assert refused.nearest == (9,)


def test_trtllm_loads_blocks_that_are_cut() -> None:
    assert judged("Qwen3-235B-A22B", "fp8", 8, "trtllm") == Shape(8)


def test_one_gpu_has_no_experts_to_deal() -> None:
    assert not judged("gpt-oss-120b", "fp8", 1, "vllm").expert_parallel


def test_a_shape_that_cannot_be_counted_is_no_reason_to_give_up_the_plan() -> None:
    """DeepSeek V4's heads leave by groups: sixteen ranks cannot be dealt whole ones."""
    refused = judged("DeepSeek-V4-Flash", "bf16", 16, "vllm")
    assert not refused.is_legal
    assert "8 groups of 8 query heads" in refused.problems[-1]
