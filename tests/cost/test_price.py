"""A step costs what the hardware takes at its limits, and what the engine adds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.cost.habits import EngineHabits
from phalanx.cost.price import Rates, Roofline, RooflineTimes, combine, least_multiplying
from phalanx.cost.work import count_work
from phalanx.engine.step_plan import StepPlan
from phalanx.engine.step_sums import StepSums
from phalanx.models import catalog
from phalanx.spec.machine import Machine

PERFECT = Rates(1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
REAL = Rates(0.8, 0.7, 0.9, 0.8, 0.4, 0.5, 0.8, 0.5, 1.2, 2, 30, 10, 20, 50, 0.1, 0.5, 10, 8, 2)


def limits(name: str = "Llama-3.3-70B", machine: str = "4xH100-SXM", weights: str = "bf16") -> Roofline:
    hardware = Machine.parse(machine)
    work = count_work(catalog.model(name), len(hardware), weights, "bf16")
    return Roofline(work, hardware.gpus[0], hardware.link(len(hardware)), "vllm")


def seconds(step: StepSums, of: Roofline, rates: Rates = PERFECT) -> float:
    return float(combine(of.of(step), rates).total)


def test_a_lone_decode_at_the_limits_reads_every_weight_once() -> None:
    """Llama 70B in bf16 over one H100's 3.35 TB/s, embedding left out: 139.0 GB / 3.35 TB/s."""
    assert seconds(StepSums(1, 1), limits(machine="1xH100-SXM")) == pytest.approx(139.0e9 / 3.35e12, rel=0.005)


def test_a_long_prompt_at_the_limits_computes_every_product() -> None:
    one = limits("Llama-3.1-8B", "1xH100-SXM")
    dense = 2 * 6.98e9 * 8192 / 989e12
    attention = 4 * 32 * 32 * 128 * (8192 * 8193 / 2) / 989e12
    assert seconds(StepSums(0, 0, 8192, 8192 * 8193 / 2, 1), one) == pytest.approx(dense + attention, rel=0.01)


def test_context_costs_its_bytes() -> None:
    one = limits("Llama-3.1-8B", "1xH200")
    added = seconds(StepSums(8, 8 * 9192), one) - seconds(StepSums(8, 8 * 1000), one)
    assert added == pytest.approx(8 * 8192 * 131_072 / 4.8e12, rel=1e-6)


def test_sliding_layers_read_no_further_than_their_window() -> None:
    one = limits("gpt-oss-120b", "1xH200", "mxfp4")
    added = seconds(StepSums(1, 8192), one) - seconds(StepSums(1, 4096), one)
    assert added == pytest.approx(4096 * 36_864 / 4.8e12, rel=1e-6)


@pytest.mark.parametrize(
    "step",
    [
        StepSums(8, 8000),
        StepSums(16, 8000),
        StepSums(8, 16_000),
        StepSums(8, 8000, 1024, 1024 * 512, 1),
        StepSums(8, 8000, 2048, 2048 * 1024, 2),
    ],
)
def test_a_step_of_a_real_engine_is_the_sum_of_its_parts(step: StepSums) -> None:
    """Llama 70B over four H100s, by hand: 855.6M weights a layer, 1.05G in the head, 320 KiB of cache a token."""
    found = limits().of(step)
    bandwidth, flops, tokens = 3.35e12, 989e12, step.decodes + step.prompt_tokens

    def product(weights: float, rows: int) -> float:
        reading, computing = 2 * weights / 4 / bandwidth / 0.8, 2 * rows * weights / 4 / flops / 0.7
        return (reading**3 + computing**3) ** (1 / 3)

    weights = product(80 * 855.6e6, tokens) + product(128_256 * 8192, step.decodes + step.prompts)
    cache = step.context * 80 * 4096 / 4 / bandwidth / 0.8
    pairs = step.prompt_pairs * 80 * 4 * 64 * 128 / 4 / flops / 0.5
    prompt = step.prompts > 0
    passes = 2 * 80 * tokens * 8192 * 2 / bandwidth
    gpu = weights + cache + pairs + 1.2 * found.all_reduce + 80 * 30e-6 + passes
    launches, host = prompt * 80 * 50e-6, step.decodes * 10e-6 + 0.1e-3 + prompt * 0.5e-3
    assert float(combine(found, REAL).total) == pytest.approx(gpu + launches + host, rel=0.002)
    eager = combine(found._replace(is_eager=1.0), REAL).total
    assert float(eager) == pytest.approx((gpu**3 + launches**3) ** (1 / 3) + host, rel=0.002)


def test_fp8_halves_what_is_read() -> None:
    half, whole = limits(weights="fp8").of(StepSums(1, 1)), limits().of(StepSums(1, 1))
    assert half.linear_read == pytest.approx(whole.linear_read / 2, rel=0.01)
    assert half.linear_compute == pytest.approx(whole.linear_compute / 2, rel=0.01)


def test_experts_are_read_as_far_as_tokens_touch_them() -> None:
    moe = limits("Qwen3-235B-A22B", "4xH200", "fp8")
    one, two, many = (moe.of(StepSums(rows, rows)).expert_read for rows in (1, 2, 512))
    assert one < two < 2 * one
    assert many == pytest.approx(one * 128 / 8, rel=0.001)


def test_only_rows_that_sample_pass_the_head() -> None:
    decodes, with_prompts = limits().of(StepSums(8, 8000)), limits().of(StepSums(8, 8000, 4096, 4096 * 1024, 4))
    assert decodes.head_compute == pytest.approx(8 * 2 * 128256 / 4 * 8192 / 989e12)
    assert with_prompts.head_compute == pytest.approx(decodes.head_compute * 12 / 8)
    assert with_prompts.head_read == decodes.head_read


def test_experts_may_gain_less_from_bandwidth_than_it_grows() -> None:
    def seconds_of(machine: str, power: float) -> float:
        found = limits("Qwen3-235B-A22B", machine, "fp8").of(StepSums(1, 1))
        return float(combine(found, PERFECT._replace(expert_bandwidth_power=power)).experts)

    assert seconds_of("4xH100-SXM", 1) / seconds_of("4xH200", 1) == pytest.approx(4.8 / 3.35, rel=0.001)
    assert seconds_of("4xH100-SXM", 0) / seconds_of("4xH200", 0) == pytest.approx(1, rel=0.001)


def test_two_all_reduces_a_layer() -> None:
    found = limits().of(StepSums(8, 8))
    assert found.all_reduce == pytest.approx(2 * 80 * 5.8e-6, rel=0.01)  # 8 x 8192 x 2 B = 128 KiB over TP4
    assert limits(machine="1xH100-SXM").of(StepSums(8, 8)).all_reduce == 0


def test_overheads_count_layers_rows_and_prompts() -> None:
    step, prompt = limits().of(StepSums(8, 8000)), limits().of(StepSums(8, 8000, 64, 64 * 32, 1))
    added = combine(step, PERFECT._replace(layer_us=10, row_us=5, step_ms=2)).overhead
    assert added == pytest.approx(80 * 10e-6 + 8 * 5e-6 + 2e-3)
    of_prompts = combine(step, PERFECT._replace(prompt_layer_us=10, prompt_step_ms=1, fp8_layer_us=3)).overhead
    assert of_prompts == pytest.approx(0, abs=1e-12)
    assert combine(prompt, PERFECT._replace(prompt_step_ms=1)).overhead == pytest.approx(1e-3)
    quantised = limits(weights="fp8").of(StepSums(8, 8000))
    assert combine(quantised, PERFECT._replace(fp8_layer_us=3)).overhead == pytest.approx(80 * 3e-6)


def test_a_host_that_works_ahead_adds_little_until_it_takes_longer() -> None:
    """100 rows of 10 us take 1 ms, and the GPU some 45. Of a host that takes a second, little else is seen."""
    waits = limits(machine="1xH100-SXM")
    works_ahead = replace(waits, habits=EngineHabits(overlaps=True))
    step = StepSums(100, 100_000)
    alone = seconds(step, waits)
    slow = PERFECT._replace(row_us=10)
    assert seconds(step, waits, slow) == pytest.approx(alone + 1e-3)
    assert alone < seconds(step, works_ahead, slow) < alone + 1e-6
    assert seconds(step, works_ahead, PERFECT._replace(row_us=10_000)) == pytest.approx(1.0, rel=1e-3)


def test_a_step_priced_in_an_array_costs_the_same() -> None:
    steps = [
        StepSums(8, 8000),
        StepSums(1, 10),
        StepSums(8, 8000, 512, 512 * 256, 1),
        StepSums(0, 0, 2048, 2048 * 1024, 2),
    ]
    found = [limits("Qwen3-235B-A22B", "4xH200", "fp8").of(step) for step in steps]
    together = combine(RooflineTimes(*np.array(found).T), REAL).total
    assert together.tolist() == pytest.approx([float(combine(one, REAL).total) for one in found])


def test_a_step_is_read_off_its_plan() -> None:
    plan = StepPlan(
        step=1,
        admissions=[],
        slots=[0, 1, 2, 3],
        starts=[99, 49, 0, 100],
        counts=[1, 1, 30, 20],
        samples=[1, 1, 0, 1],
        new_blocks=[],
    )
    pairs = sum(range(1, 31)) + sum(range(101, 121))
    assert plan.sums() == StepSums(2, 150, 50, pairs, 2)
    assert plan.sums().tokens == 52


def test_experts_pass_on_the_activations_of_their_tokens() -> None:
    """Qwen3-235B: 94 layers, 8 experts a token of 4,096 in and 1,536 inside, each passed on thrice in two bytes. Only
    the inside is split over ranks.
    """
    for ranks, inside in ((1, 1536), (4, 384)):
        found = limits("Qwen3-235B-A22B", f"{ranks}xH200", "fp8").of(StepSums(512, 512))
        bytes_on = 2 * 3 * 94 * 8 * 512 * (4096 + inside)
        assert found.routed == pytest.approx(bytes_on / 4.8e12, rel=1e-3)
        added = combine(found, PERFECT._replace(routed_passes=2)).experts - combine(found, PERFECT).experts
        assert added == pytest.approx(2 * found.routed)
    assert limits().of(StepSums(512, 512)).routed == 0


@pytest.mark.parametrize(
    ("model", "plain_layers"),
    [
        ("Llama-3.3-70B", 80.0),
        ("Qwen3-235B-A22B", 94 * 1.6),
        ("DeepSeek-V3", 61 * 2.5 + 58 * 0.6),
        ("Qwen3-Next-80B-A3B", 48 * 1.6 + 36 * 1.5),
    ],
)
def test_prompts_launch_more_kernels_where_layers_have_experts_latents_or_states(
    model: str, plain_layers: float
) -> None:
    """Three of four layers of Qwen3-Next have states, three of DeepSeek's no experts. Decodes run as graphs."""
    roofline = limits(model, "8xH200", "fp8")
    assert roofline.of(StepSums(8, 8000)).launches == 0
    assert roofline.of(StepSums(8, 8000, 64, 64 * 32, 1)).launches == pytest.approx(plain_layers)


def test_launches_one_by_one_are_hidden_where_the_gpu_has_enough_to_do() -> None:
    """80 layers of 500 us are 40 ms: nearly all of a short prompt, and little beside the second of a long one."""
    one, slow = (
        replace(limits(machine="1xH100-SXM"), habits=EngineHabits(is_eager=True)),
        PERFECT._replace(prompt_layer_us=500),
    )
    for tokens, most in ((16, 1.6), (8192, 1.001)):
        step = StepSums(0, 0, tokens, tokens * tokens // 2, 1)
        alone, launched = seconds(step, one), seconds(step, one, slow)
        longer = max(alone, 40e-3)
        assert longer < launched < most * longer


def test_layers_with_latents_or_states_take_longer_in_every_step() -> None:
    slow = PERFECT._replace(woven_layer_us=10)
    for model, woven in (("Llama-3.3-70B", 0), ("DeepSeek-V3", 61), ("Qwen3-Next-80B-A3B", 36)):
        found = limits(model, "8xH200", "fp8").of(StepSums(8, 8000))
        added = combine(found, slow).total - combine(found, PERFECT).total
        assert added == pytest.approx(woven * 10e-6), model


@pytest.mark.parametrize(("weights", "rounds", "slower"), [("fp8", 1, 1), ("fp8-channel", 0, 0), ("nvfp4", 1, 0)])
def test_inputs_scaled_by_block_are_made_by_a_kernel_of_their_own(weights: str, rounds: int, slower: int) -> None:
    hardware = Machine.parse("1xB200")
    work = count_work(catalog.model("Llama-3.3-70B"), 1, weights, "bf16")
    found = Roofline(work, hardware.gpus[0], hardware.link(1), "vllm").of(StepSums(8, 8000))
    assert (found.rounds_inputs, found.scales_blocks) == (rounds, slower)


def test_a_native_host_takes_no_time_for_rows_and_steps() -> None:
    step, slow = StepSums(100, 100_000), PERFECT._replace(row_us=10, step_ms=2, prompt_step_ms=1)
    native = replace(limits(), habits=EngineHabits(is_native=True))
    assert seconds(step, native, slow) == seconds(step, native)
    assert seconds(step, limits(), slow) == pytest.approx(seconds(step, native) + 3e-3)


@pytest.mark.parametrize(
    ("machine", "rows", "milliseconds"), [("1xH100-SXM", 64, 0), ("4xH100-SXM", 64, 0.72 + 64 * 0.033)]
)
def test_rows_are_sent_to_other_ranks_where_there_are_any(machine: str, rows: int, milliseconds: float) -> None:
    plain = limits(machine=machine)
    added = seconds(StepSums(rows, 64_000), replace(plain, habits=EngineHabits(sends_rows=True)))
    assert added - seconds(StepSums(rows, 64_000), plain) == pytest.approx(1e-3 * milliseconds, abs=1e-12)


def test_a_context_that_is_not_split_is_read_no_faster_than_one_block_of_threads_can() -> None:
    """Llama 8B: 32 layers of 512 bytes a head and token at 110 GB/s, whatever the ranks. For 64 rows memory bounds."""
    for machine in ("1xH100-SXM", "4xH100-SXM"):
        plain = limits("Llama-3.1-8B", machine)
        whole = replace(plain, habits=EngineHabits(splits_contexts=False))
        assert whole.of(StepSums(1, 3000)).cache_read == pytest.approx(32 * 512 * 3000 / 110e9)
        assert whole.of(StepSums(1, 3000)).cache_read > plain.of(StepSums(1, 3000)).cache_read
    many = StepSums(64, 64 * 3000)
    assert whole.of(many).cache_read == plain.of(many).cache_read
    assert whole.of(StepSums(0, 0, 64, 64 * 32, 1)).cache_read == 0


@pytest.mark.parametrize(
    ("machine", "weights", "microseconds"),
    [("8xMI300X", "fp8", 232), ("8xMI300X", "fp8-channel", 0), ("8xMI300X", "bf16", 0), ("8xH200", "fp8", 0)],
)
def test_products_scaled_by_block_are_slow_on_amd(machine: str, weights: str, microseconds: float) -> None:
    """Four a layer, each 68 us for 10."""
    found = limits(machine=machine, weights=weights).of(StepSums(1, 1000))
    assert found.slow_blocks == pytest.approx(80 * microseconds * 1e-6)
    assert combine(found, PERFECT).overhead == pytest.approx(found.slow_blocks, abs=1e-12)


def test_experts_multiply_whole_tiles() -> None:
    """Qwen3-235B: 8 of 128 experts a token. 8,192 tokens are 512 for each expert, and half a tile of 128 more. Few
    tokens are padded by no more than there are, and the least that a step can take knows of no tile.
    """
    moe = limits("Qwen3-235B-A22B", "4xH200", "fp8")
    many, few = moe.of(StepSums(0, 0, 8192, 1.0, 1)), moe.of(StepSums(16, 16))
    assert many.expert_padding / many.expert_compute == pytest.approx(64 / 512, rel=1e-3)
    assert few.expert_padding == few.expert_compute
    assert limits().of(StepSums(16, 16)).expert_padding == 0
    assert least_multiplying(many) == least_multiplying(many._replace(expert_padding=1.0))
    padded, exact = (
        combine(each, PERFECT._replace(expert_compute=0.5)).experts
        for each in (many, many._replace(expert_padding=0.0))
    )
    assert padded / exact == pytest.approx(1 + 64 / 512, rel=0.01)
