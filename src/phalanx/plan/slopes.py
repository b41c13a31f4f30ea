"""How a step's seconds move with the rates: what `cost.price.combine` says, differentiated. Needs numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.cost.price import (
    REFERENCE_BANDWIDTH,
    Rates,
    RooflineTimes,
    combine,
    host_seconds,
    launch_seconds,
    with_host,
)

Array = Any


def step_slopes(limits: RooflineTimes, rates: Rates) -> Rates:
    """Seconds by which a step grows for every unit of a rate's logarithm."""
    compute = rates.linear_compute * rates.fp8_compute**limits.scales_blocks
    reads, multiplies = _parts(limits.linear_read / rates.linear_bandwidth, limits.linear_compute / compute)
    head_reads, head_multiplies = _parts(
        limits.head_read / rates.linear_bandwidth, limits.head_compute / rates.linear_compute
    )
    ratio = limits.bandwidth / REFERENCE_BANDWIDTH
    slower = ratio ** (1 - rates.expert_bandwidth_power)
    expert_reads, expert_multiplies = _parts(
        limits.expert_read * slower / rates.expert_bandwidth,
        (limits.expert_compute + limits.expert_padding) / rates.expert_compute,
    )
    nothing = np.zeros_like(reads)
    on_host, on_gpu, on_launches = _shares(limits, rates)
    in_python = (1 - limits.is_native) * on_host
    gpu = Rates(
        linear_bandwidth=-reads - head_reads,
        linear_compute=-multiplies - head_multiplies,
        fp8_compute=-multiplies * limits.scales_blocks,
        expert_bandwidth=-expert_reads,
        expert_compute=-expert_multiplies,
        expert_bandwidth_power=-expert_reads * np.log(ratio) * rates.expert_bandwidth_power,
        cache_bandwidth=-limits.cache_read / rates.cache_bandwidth,
        prompt_attention=-limits.prompt_attention / rates.prompt_attention,
        all_reduce=limits.all_reduce * rates.all_reduce,
        activation_passes=limits.activations * rates.activation_passes,
        layer_us=1e-6 * limits.layers * rates.layer_us,
        fp8_layer_us=1e-6 * limits.layers * limits.rounds_inputs * rates.fp8_layer_us,
        sparse_layer_us=1e-6 * limits.sparse_layers * rates.sparse_layer_us,
        prompt_layer_us=nothing,
        step_ms=nothing,
        prompt_step_ms=nothing,
        row_us=nothing,
        first_token_ms=nothing,
        prompt_token_us=nothing,
        routed_passes=limits.routed * rates.routed_passes,
        woven_layer_us=1e-6 * limits.woven_layers * rates.woven_layer_us,
    )
    return Rates(*(slope * on_gpu for slope in gpu))._replace(
        step_ms=1e-3 * rates.step_ms * in_python,
        prompt_step_ms=1e-3 * limits.has_prompt * rates.prompt_step_ms * in_python,
        row_us=1e-6 * limits.rows * rates.row_us * in_python,
        prompt_layer_us=launch_seconds(limits, rates) * on_launches,
    )


def _shares(limits: RooflineTimes, rates: Rates) -> tuple[Array, Array, Array]:
    """How much of what the host, what the GPU and what launches take longer a step does."""
    host = host_seconds(limits, rates)
    gpu = combine(limits._replace(sent=0.0), rates.without_host).total
    launches = launch_seconds(limits, rates)
    launched = with_host(gpu, launches, limits.is_eager)
    whole = with_host(launched, host, limits.overlaps)
    rest = (launched / whole) ** (2 * limits.overlaps)
    beside = 2 * limits.is_eager
    on_host = (host / whole) ** (2 * limits.overlaps)
    return on_host, rest * (gpu / launched) ** beside, rest * (launches / launched) ** beside


def _parts(read: Array, compute: Array) -> tuple[Array, Array]:
    """What each of two that overlap adds to their cubic mean."""
    mean = np.maximum((read**3 + compute**3) ** (1 / 3), 1e-30)
    return read**3 / mean**2, compute**3 / mean**2
