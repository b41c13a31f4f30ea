"""Point: what was measured at one TP degree, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.bench.ceilings import Ceilings
from phalanx.bench.timing import FixedBatch, Timing
from phalanx.cost.work import RankWork

_SECONDS_AN_HOUR = 3600
_OVERLAPPED = 0.0
"""Of the time in collectives. Phalanx runs them in line with the layers: none of it is hidden behind other work."""


class Waiting(NamedTuple):
    """Seconds in collectives, of a decode step and of all prompts."""

    decode: float
    prompts: float


class PlannedPoint(NamedTuple):
    """What the planner expects: seconds of all prompts, and of a decode step with its interval and its collectives."""

    prompts: float
    tpot: float
    tpot_low: float
    tpot_high: float
    all_reduce: float


@dataclass(frozen=True)
class LabPoint:
    """TTFT is until the whole batch has its first token; `ttft_alone_ms` is that of one prompt on an idle engine.

    TPOT is of the steps in which all requests decode; `clocks_ms` of it are in those steps by their own clocks,
    `between_ms` between them. `tok_s` are the answers' tokens over the whole run, `decode_tok_s` those of the steps in
    which all decode. Shares are of such a step; those of limits hold what was achieved against what this machine was
    measured to do. `kv_tokens` is the room of the KV cache and `longest_context` what each request of this batch may
    have of it.
    """

    tp: int
    ttft_ms: float
    ttft_alone_ms: float
    tpot_ms: float
    clocks_ms: float
    between_ms: float
    decode_tok_s: float
    tok_s: float
    tok_s_per_gpu: float
    efficiency: float
    prefill_tok_s: float
    decode_collectives: float
    prompt_collectives: float
    overlap: float
    achieved_gb_s: float
    of_bandwidth: float
    achieved_gflop_s: float
    of_flops: float
    usd_per_million: float | None
    kv_tokens: int
    longest_context: int
    bottleneck: str
    planned_ttft_ms: float | None
    planned_tpot_ms: float | None
    planned_tpot_low_ms: float | None
    planned_tpot_high_ms: float | None
    planned_collectives: float | None
    least_ttft_ms: float
    least_tpot_ms: float


def point_of(
    tp: int,
    case: FixedBatch,
    timing: Timing,
    alone: float,
    work: RankWork,
    ceilings: Ceilings,
    waiting: Waiting,
    room: tuple[int, int],
    usd_per_hour: float | None,
    base: LabPoint | None,
    planned: PlannedPoint | None,
    on_gpu: bool,
) -> LabPoint:
    tpot, clocked = timing.tpot, timing.clocked(on_gpu)
    tok_s = case.batch * case.outputs / timing.whole
    read, multiplied = work.bytes_of(case.decode_step), work.flops_of(case.prompts)
    by_ranks = clocked if on_gpu else (timing.decode_clocks.device + timing.decode_clocks.all_reduce) / timing.steps
    shares = {
        "collectives": waiting.decode / tpot,
        "memory": read / ceilings.bytes_per_s / tpot,
        "products": work.flops_of(case.decode_step) / ceilings.flops_per_s / tpot,
        "host": (tpot - by_ranks) / tpot,
    }
    worst = max(shares, key=lambda name: shares[name])
    return LabPoint(
        tp=tp,
        ttft_ms=timing.first * 1e3,
        ttft_alone_ms=alone * 1e3,
        tpot_ms=tpot * 1e3,
        clocks_ms=clocked * 1e3,
        between_ms=(tpot - clocked) * 1e3,
        decode_tok_s=case.batch / tpot,
        tok_s=tok_s,
        tok_s_per_gpu=tok_s / tp,
        efficiency=1.0 if base is None else tok_s / tp / base.tok_s_per_gpu,
        prefill_tok_s=case.batch * case.inputs / timing.first,
        decode_collectives=shares["collectives"],
        prompt_collectives=waiting.prompts / timing.first,
        overlap=_OVERLAPPED,
        achieved_gb_s=read / tpot / 1e9,
        of_bandwidth=shares["memory"],
        achieved_gflop_s=multiplied / timing.first / 1e9,
        of_flops=multiplied / timing.first / ceilings.flops_per_s,
        usd_per_million=None if usd_per_hour is None else usd_per_hour / _SECONDS_AN_HOUR / tok_s * 1e6,
        kv_tokens=room[0],
        longest_context=room[1],
        bottleneck=f"{worst} {shares[worst]:.0%}",
        planned_ttft_ms=None if planned is None else planned.prompts * 1e3,
        planned_tpot_ms=None if planned is None else planned.tpot * 1e3,
        planned_tpot_low_ms=None if planned is None else planned.tpot_low * 1e3,
        planned_tpot_high_ms=None if planned is None else planned.tpot_high * 1e3,
        planned_collectives=None if planned is None else planned.all_reduce / planned.tpot,
        least_ttft_ms=ceilings.seconds(0, multiplied) * 1e3,
        least_tpot_ms=ceilings.seconds(read, work.flops_of(case.decode_step)) * 1e3,
    )
