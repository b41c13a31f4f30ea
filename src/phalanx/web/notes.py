"""What the rules of the doctor say of the last minute of this server."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from phalanx.doctor.finding import Finding
from phalanx.doctor.live import Picture, findings_of
from phalanx.web.sampler import PARTS, RankSample, Sample

MINUTE = 60
_FEWEST = 10
"""Samples with requests running all the time, before anything is said."""
_ALL_THE_TIME = 0.99
_DEVICE, _ALL_REDUCE = PARTS.index("device"), PARTS.index("all_reduce")


def notes_of(samples: Sequence[Sample], on_gpus: bool, shares: Sequence[float]) -> list[Finding]:
    """Of the seconds of the last minute that had requests all the time. `shares`: what the layout deals to ranks."""
    lately = samples[-MINUTE:]
    busy = [sample for sample in lately if sample.up and sample.working >= _ALL_THE_TIME and sample.steps > 0]
    told = [sample for sample in busy if sample.ranks and None not in sample.ranks]
    if len(told) < _FEWEST:
        return []
    return findings_of(_picture(told, on_gpus, shares))


def _picture(samples: Sequence[Sample], on_gpus: bool, shares: Sequence[float]) -> Picture:
    ranks = [
        [rank for rank in (sample.ranks[number] for sample in samples) if rank is not None]
        for number in range(len(samples[0].ranks))
    ]
    steps = sum(sample.steps for sample in samples)
    period = 1e3 * len(samples) / steps
    gaps = [sample for sample in samples if sample.itl_mean is not None and sample.expected_itl is not None]
    return Picture(
        ranks=len(ranks),
        on_gpus=on_gpus,
        steps=round(steps),
        step=period,
        decodes=fmean(sample.running for sample in samples),
        waited=None if on_gpus or len(ranks) == 1 else 0.0,
        exchanged=None if on_gpus or len(ranks) == 1 else fmean(_part(rank, _ALL_REDUCE) for rank in ranks),
        idle=max(0.0, 1 - fmean(rank.busy for rank in ranks[0])) * period,
        worked=[_part(rank, _DEVICE) for rank in ranks],
        share=list(shares),
        preemptions=sum(sample.preemptions for sample in samples) / steps,
        token_gap=fmean(sample.itl_mean or 0.0 for sample in gaps) if gaps else None,
        expected_gap=_expected(gaps),
    )


def _part(samples: Sequence[RankSample], part: int) -> float:
    return fmean(sample.parts_ms[part] for sample in samples)


def _expected(samples: Sequence[Sample]) -> tuple[float, float, float] | None:
    """The middle, the least and the most."""
    if not samples:
        return None
    mid, low, high = (fmean(column) for column in zip(*(sample.expected_itl or [] for sample in samples), strict=True))
    return mid, low, high
