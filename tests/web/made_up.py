"""A live stream of an engine that never was: samples of a second, and a state, as the server would send them."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from phalanx.server.engine_client import RankHealth
from phalanx.server.gpu_watch import GpuReading
from phalanx.web.live import EngineState, Event
from phalanx.web.sampler import GpuSample, RankSample, Sample

NOW = 1_790_000_000.0


def sample(ago: int, **changes: Any) -> Sample:
    """A busy second; waves make lines that can be seen to differ."""
    wave = 1 + 0.2 * math.sin(ago / 25)
    gap = 9.0 * wave
    usual: dict[str, Any] = {
        "time": NOW - ago,
        "up": True,
        "inputs": 2100 * wave,
        "cached": 900.0,
        "outputs": 3200 / wave,
        "expected_out": 3300.0,
        "ttft": [90 * wave, 140 * wave, 210 * wave],
        "itl": [gap, 1.3 * gap, 1.9 * gap],
        "itl_mean": gap,
        "expected_itl": [8.6, 6.9, 12.5],
        "running": 28 * wave,
        "waiting": max(0.0, 3 * wave - 2),
        "held": 0.4 * wave,
        "kept": 0.3,
        "hits": 0.43,
        "accepted": None,
        "preemptions": 0,
        "steps": 110 / wave,
        "ranks": [RankSample([0.3, 0.2, 5.5 * wave, 1.9 + rank / 4, 0.4], 0.93) for rank in range(2)],
    }
    return Sample(**usual | changes)


def gpu(index: int) -> GpuReading:
    return GpuReading(index, "NVIDIA H100 80GB HBM3", 71.5, 79.6, 640.0, 700.0, 66)


def gpu_sample(index: int, ago: int) -> GpuSample:
    return GpuSample(round(70.5 + index, 1), round(610 + 30 * math.sin(ago / 15 + index)), 64 + index)


def event(samples: list[Sample], gpus: int = 0) -> dict[str, Any]:
    state = EngineState(
        status="ready",
        reason=None,
        loaded=None,
        restarts_left=1,
        requests=28,
        device="NVIDIA H100 80GB HBM3" if gpus else "cpu",
        max_num_seqs=64,
        kv_tokens=420_000,
        ranks=[RankHealth(rank, "here", 4711, 0.1, 0.0, False) for rank in range(2)],
        expected={"kind": "plan", "source": "The plan of 2 x H100."},
        viewers=1,
        gpus=[gpu(index) for index in range(gpus)],
    )
    made: dict[str, Any] = msgspec.to_builtins(Event(state, samples))
    return made
