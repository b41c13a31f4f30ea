"""The price of a step: its times at the hardware's limits (`Roofline`), and an engine's distance to them (`Rates`).

`combine` uses plain arithmetic only, so that prediction runs it on floats and calibration on arrays of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from phalanx.cost.allreduce import hand_over_seconds
from phalanx.cost.calibrated import bandwidth_factor, calibrated_all_reduce, compute_factor
from phalanx.cost.habits import PLAIN_HABITS, EngineHabits
from phalanx.cost.work import RankWork
from phalanx.engine.step_sums import StepSums
from phalanx.spec.calibration import Calibration
from phalanx.spec.machine import Gpu, Link

_ACTIVATION_BYTES = 2
REFERENCE_BANDWIDTH = 4e12
_INPUT_BYTES = {"fp8": 1.0, "mxfp4": 1.0, "fp4": 0.5625}
"""Of a number that is sent to experts who multiply in these formats; NVFP4 has a byte of scale for sixteen."""
_FP8_ATTENTION = 1.6
"""Against bf16: 1.2 PFLOP/s for 740 TFLOP/s on an H100 (FlashAttention-3, 2024-07)."""
_UNEVEN = 0.11
"""Ranks to this power have the busiest of them do so much more than the mean, where each has experts of its own. Kernel
tables of H200 and B200 (vLLM 0.24), tokens dealt to experts by a power law against evenly, beside one rank: 1.09 to
1.13 on 2 ranks, 1.15 to 1.24 on 4, 1.19 to 1.36 on 8."""
_SCALED_BY_BLOCK = ("fp8", "nvfp4", "mxfp4")
"""Formats of weights whose inputs are scaled by block, a kernel more each. A scale for a whole tensor or row is applied
where the input is made (TensorRT-LLM and vLLM, checkpoints with static scales)."""
_LAUNCHED_BY_EXPERTS, _LAUNCHED_BY_WOVEN = 0.6, 1.5
"""Kernels that a layer launches for prompts beyond the dozen of a plain one, as a share of those. Roughly counted in
SGLang, where prompts run without graphs (models/qwen3_moe.py and qwen3_next.py, read 2026-11-18): with experts it
chooses, sorts, gathers and sums besides (7), with states it splits, copies, gates and scans in pieces (18). Latents
are taken as alike.
"""


_SENT_STEP, _SENT_ROW = 0.72e-3, 33e-6
"""By two runs that vLLM's developers tell of, beyond what all else here says of them (8.0 and 21.2 ms): 8 rows of 8B on
two A100 (8.99 ms a step, 0.6.3, vllm-project/vllm#9856), 256 of 7B on four H100 (30.3 ms, 0.5.2, #6032).
"""
_MULTIPROCESSOR_BANDWIDTH = 110e9
"""Bytes a second that one of a card takes from L2: 64 a clock, at 1.7 GHz."""
_LAYER_PRODUCTS, _BLOCK_PRODUCT, _AMD_BLOCK_PRODUCT = 4, 10e-6, 68e-6
"""Seconds of a product of few rows scaled by block: tuned for AMD, 2,112 x 7,168 and 64 rows (ROCm/aiter#1232, 2025-10;
129 us untuned), and about what it takes elsewhere.
"""


class RooflineTimes(NamedTuple):
    """Seconds of a step at peak bandwidth and peak FLOP/s, and the counts that overheads grow with."""

    linear_read: float
    linear_compute: float
    expert_read: float
    expert_compute: float
    expert_padding: float
    head_read: float
    head_compute: float
    cache_read: float
    prompt_attention: float
    all_reduce: float
    activations: float
    layers: float
    sparse_layers: float
    rows: float
    has_prompt: float
    bandwidth: float
    rounds_inputs: float
    overlaps: float
    routed: float
    scales_blocks: float
    woven_layers: float
    launches: float
    is_eager: float
    is_native: float
    sent: float
    slow_blocks: float


class Rates(NamedTuple):
    """An engine family on top of the limits: shares of peak reached, microseconds and milliseconds added.

    As fitted they are those on an H200; `kernels.at_reach` has those on another card.
    """

    linear_bandwidth: float
    linear_compute: float
    fp8_compute: float
    expert_bandwidth: float
    expert_compute: float
    expert_bandwidth_power: float
    cache_bandwidth: float
    prompt_attention: float
    all_reduce: float
    activation_passes: float
    layer_us: float
    fp8_layer_us: float
    sparse_layer_us: float
    prompt_layer_us: float
    step_ms: float
    prompt_step_ms: float
    row_us: float
    first_token_ms: float
    prompt_token_us: float
    routed_passes: float = 0.0
    woven_layer_us: float = 0.0

    @property
    def without_host(self) -> Rates:
        """Of the GPU alone."""
        return self._replace(step_ms=0.0, prompt_step_ms=0.0, row_us=0.0, prompt_layer_us=0.0)


class StepCost(NamedTuple):
    """Seconds of a step by what they go to."""

    weights: Any
    experts: Any
    attention: Any
    all_reduce: Any
    overhead: Any

    @property
    def total(self) -> Any:
        return self.weights + self.experts + self.attention + self.all_reduce + self.overhead


@dataclass(frozen=True)
class Roofline:
    """Prices steps of one model on one machine at the hardware's limits: its datasheet's, or as it was measured, for an
    engine of these `habits`. A pipeline of several `stages` has links `between` them.
    """

    work: RankWork
    gpu: Gpu
    link: Link
    implementation: str
    calibration: Calibration | None = None
    stages: int = 1
    between: Link | None = None
    habits: EngineHabits = PLAIN_HABITS

    def of(self, step: StepSums) -> RooflineTimes:
        work, habits, bandwidth, tokens = self.work, self.habits, self.memory_bandwidth, step.tokens
        shared = self._of_tokens.get(tokens)
        if shared is None:
            shared = self._of_tokens[tokens] = self._count_tokens(tokens)
        linear_compute, expert_read, expert_compute, expert_padding, all_reduce, activations, routed = shared
        return RooflineTimes(
            linear_read=work.linear_bytes / bandwidth,
            linear_compute=linear_compute,
            expert_read=expert_read,
            expert_compute=expert_compute,
            expert_padding=expert_padding,
            head_read=work.head_bytes / bandwidth,
            head_compute=(step.decodes + step.prompts) * work.head_flops / self.peak("bf16"),
            cache_read=max(work.cache_read(step) / bandwidth, self.one_by_one(step)),
            prompt_attention=work.attention_flops(step.prompt_tokens, step.prompt_pairs) / self.attention_peak,
            all_reduce=all_reduce,
            activations=activations,
            layers=work.layers,
            sparse_layers=work.sparse_layers,
            rows=step.decodes,
            has_prompt=float(step.prompt_tokens > 0),
            bandwidth=self.gpu.bandwidth,
            rounds_inputs=float(work.compute != "bf16" and work.linear_format in _SCALED_BY_BLOCK),
            overlaps=float(habits.overlaps),
            routed=routed,
            scales_blocks=float(self._scales_blocks),
            woven_layers=work.woven_layers,
            launches=self._launches if step.prompt_tokens else 0.0,
            is_eager=float(habits.is_eager),
            is_native=float(habits.is_native),
            sent=self.sent_seconds(step.decodes),
            slow_blocks=work.layers * self.slow_block_seconds,
        )

    def one_by_one(self, step: StepSums) -> float:
        """Seconds in which single blocks of threads read the context of a sequence, a head each, layer by layer."""
        if self.habits.splits_contexts or not step.decodes:
            return 0.0
        sequence = StepSums(1, step.context / step.decodes)
        return self.work.cache_read(sequence) / self.work.kv_heads / _MULTIPROCESSOR_BANDWIDTH

    def sent_seconds(self, rows: float) -> float:
        """What it takes to send a step of so many rows to the other ranks."""
        return _SENT_STEP + rows * _SENT_ROW if self.habits.sends_rows and self.work.tp > 1 else 0.0

    @cached_property
    def slow_block_seconds(self) -> float:
        """Of a layer, beyond what is counted elsewhere."""
        is_slow = self.gpu.vendor == "AMD" and self._scales_blocks
        return _LAYER_PRODUCTS * (_AMD_BLOCK_PRODUCT - _BLOCK_PRODUCT) if is_slow else 0.0

    @property
    def _scales_blocks(self) -> bool:
        return self.work.linear_format == "fp8" and self.work.compute == "fp8"

    @cached_property
    def _launches(self) -> float:
        """Of a step with prompts, in those of plain layers."""
        work = self.work
        more = _LAUNCHED_BY_EXPERTS * work.sparse_layers + _LAUNCHED_BY_WOVEN * work.woven_layers
        return work.layers + more

    @cached_property
    def _of_tokens(self) -> dict[int, tuple[float, ...]]:
        """What depends on the number of a step's tokens alone: many steps have the same."""
        return {}

    def _count_tokens(self, tokens: int) -> tuple[float, ...]:
        work = self.work
        message = tokens * work.hidden * _ACTIVATION_BYTES
        busiest = work.attention_ranks**_UNEVEN * tokens
        return (
            tokens * work.linear_flops / self.peak(work.compute),
            work.experts_read(tokens) / self.memory_bandwidth,
            busiest * work.expert_flops / self.peak(work.expert_compute),
            work.padding(tokens) * work.expert_flops / self.peak(work.expert_compute),
            2 * work.layers * self._all_reduce(message) + self._exchange(message) + self._hand_overs(message),
            message * work.layers / self.memory_bandwidth,
            busiest * work.routed_bytes / self.memory_bandwidth,
        )

    @cached_property
    def memory_bandwidth(self) -> float:
        """Bytes a second."""
        return self.gpu.bandwidth * bandwidth_factor(self.calibration)

    @cached_property
    def attention_peak(self) -> float:
        """FLOP/s of prompts' attention: TensorRT-LLM multiplies keys and values of eight bits as they are."""
        in_fp8 = self.implementation == "trtllm" and self.work.kv_format == "fp8" and "fp8" in self.gpu.peaks
        return self.peak("bf16") * (_FP8_ATTENTION if in_fp8 else 1.0)

    def peak(self, number_format: str) -> float:
        """FLOP/s in this format."""
        known = self._peaks.get(number_format)
        if known is None:
            known = self._peaks[number_format] = self._find_peak(number_format)
        return known

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return {}

    def _find_peak(self, number_format: str) -> float:
        if number_format == "mxfp4":  # its activations have eight bits where four-bit weights can be multiplied at all
            number_format = "fp8" if "fp4" in self.gpu.peaks else "bf16"
        return self.gpu.peak(number_format) * compute_factor(self.calibration, number_format)

    def _exchange(self, message: float) -> float:
        """Where attention is data-parallel: tokens of all ranks to the experts, as these take them, and back in bf16.
        There and back in one format is as much as an all-reduce.
        """
        work = self.work
        if work.attention_ranks == 1:
            return 0.0
        there = _INPUT_BYTES.get(work.expert_compute, _ACTIVATION_BYTES) / _ACTIVATION_BYTES
        everyone = message * work.attention_ranks * (there + 1) / 2
        once = calibrated_all_reduce(everyone, work.attention_ranks, self.link, self.implementation, self.calibration)
        return work.sparse_layers * once

    def _hand_overs(self, message: float) -> float:
        """To every stage but the first, and of what was sampled back to that."""
        if self.between is None:
            return 0.0
        return self.stages * hand_over_seconds(message, self.work.tp, self.between)

    def _all_reduce(self, size: float) -> float:
        return calibrated_all_reduce(size, self.work.tp, self.link, self.implementation, self.calibration)


def combine(limits: RooflineTimes, rates: Rates) -> StepCost:
    """Seconds of a step. Reading and computing overlap, so their cubic mean counts, near the larger of the two."""
    compute = rates.linear_compute * rates.fp8_compute**limits.scales_blocks
    linear = _overlapped(limits.linear_read / rates.linear_bandwidth, limits.linear_compute / compute)
    head = _overlapped(limits.head_read / rates.linear_bandwidth, limits.head_compute / rates.linear_compute)
    slower = (limits.bandwidth / REFERENCE_BANDWIDTH) ** (1 - rates.expert_bandwidth_power)
    products = (limits.expert_compute + limits.expert_padding) / rates.expert_compute
    experts = _overlapped(limits.expert_read * slower / rates.expert_bandwidth, products)
    experts = experts + 1e-6 * limits.sparse_layers * rates.sparse_layer_us + limits.routed * rates.routed_passes
    attention = limits.cache_read / rates.cache_bandwidth + limits.prompt_attention / rates.prompt_attention
    all_reduce = limits.all_reduce * rates.all_reduce
    layers = limits.layers * (rates.layer_us + limits.rounds_inputs * rates.fp8_layer_us)
    layers = layers + limits.woven_layers * rates.woven_layer_us
    beside = 1e-6 * layers + limits.slow_blocks + limits.activations * rates.activation_passes
    gpu = linear + head + experts + attention + all_reduce + beside
    launched = with_host(gpu, launch_seconds(limits, rates), limits.is_eager)
    added = with_host(launched, host_seconds(limits, rates), limits.overlaps) - gpu
    return StepCost(linear + head, experts, attention, all_reduce, beside + added)


def launch_seconds(limits: RooflineTimes, rates: Rates) -> Any:
    """What it takes to launch a prompt's kernels: one by one, while the GPU runs those before, or between pieces that
    were compiled, for which it waits.
    """
    return 1e-6 * limits.launches * rates.prompt_layer_us


def host_seconds(limits: RooflineTimes, rates: Rates) -> Any:
    """What the engine's own program takes for a step and its rows."""
    steps = rates.step_ms + limits.has_prompt * rates.prompt_step_ms
    return (1 - limits.is_native) * (1e-6 * limits.rows * rates.row_us + 1e-3 * steps) + limits.sent


def with_host(gpu: Any, host: Any, overlaps: Any) -> Any:
    """Seconds of a step: one after the other, or, where the host prepares the next step meanwhile, near the longer."""
    power = 1 + 2 * overlaps
    return (gpu**power + host**power) ** (1 / power)


MOST_OF_PEAK = 0.75
"""Of the data sheet's FLOP/s; the most that a serving engine was ever measured to reach is 0.61."""


def least_seconds(limits: RooflineTimes) -> float:
    """What no correction may go below: bytes at the data sheet's bandwidth, products at what was ever reached."""
    return max(least_reading(limits), least_multiplying(limits))


def least_reading(limits: RooflineTimes) -> float:
    """Experts count by three quarters: how many a step touches is itself estimated."""
    return float(limits.linear_read + limits.head_read + limits.cache_read + MOST_OF_PEAK * limits.expert_read)


def least_multiplying(limits: RooflineTimes) -> float:
    products = limits.linear_compute + limits.expert_compute + limits.head_compute + limits.prompt_attention
    return float(products / MOST_OF_PEAK)


def _overlapped(read: Any, compute: Any) -> Any:
    return (read**3 + compute**3) ** (1 / 3)


def first_token_seconds(rates: Rates, prompt_tokens: Any) -> Any:
    """What a request spends outside the engine's steps until its first token: network, tokenizer, queues."""
    return 1e-3 * rates.first_token_ms + 1e-6 * rates.prompt_token_us * prompt_tokens
