"""Marks of ranks as slices of time on one clock, and collectives over all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from phalanx.engine.marks import CALL_ENDS, PLACE, SAMPLED, SAMPLING, HostStep, RankTrace, StepMarks, StepTraces
from phalanx.engine.whereabouts import ALL_REDUCE, EMBEDDING, HEAD

_MIXERS = {"Gqa": "attention", "Mla": "latent attention", "Compressed": "compressed attention", "DeltaNet": "delta net"}
_FFNS = {"Dense": "FFN", "Moe": "experts"}
_OUTSIDE = {EMBEDDING: "embedding", HEAD: "head", SAMPLING: "sampling", SAMPLED: "read tokens"}
PREPARE = "prepare"
"""From a step's beginning on a rank to its first part: inputs are made ready."""
ALIGNED_NS = 20_000
"""Clocks of ranks are to be known this well."""


@dataclass
class Slice:
    """A part of a step on one rank, in ns of the engine's clock. `layer` is None outside of layers. `called` is the
    time in it that went to collectives.
    """

    name: str
    layer: int | None
    begun: int
    ended: int
    called: int = 0

    @property
    def own(self) -> int:
        """Time that the rank worked by itself."""
        return self.ended - self.begun - self.called


@dataclass
class Call:
    """A collective: its bytes on one rank, and when each rank came and left, in order of ranks."""

    kind: str
    layer: int | None
    part: str
    size: int
    came: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    @property
    def all_there(self) -> int:
        return max(self.came)

    @property
    def last(self) -> int:
        """The rank that the others waited for."""
        return self.came.index(self.all_there)

    def waited(self, rank: int) -> int:
        """For the last to come. What is left of the call is the exchange itself."""
        return min(self.all_there, self.left[rank]) - self.came[rank]

    def exchanged(self, rank: int) -> int:
        return max(0, self.left[rank] - self.all_there)


@dataclass
class RankStep:
    """A step on one rank, from the order to its tokens."""

    rank: int
    begun: int
    ended: int
    slices: list[Slice]


@dataclass
class Step:
    """A step over all ranks. Since the step before was booked, `period` has passed until this one was; for a `pause`
    of it the engine did neither. None for the first, and where no request was there in between.
    """

    host: HostStep
    ranks: list[RankStep]
    calls: list[Call]
    pause: int | None
    period: int | None
    idle: int | None
    """How long rank 0 had nothing to do before this step."""

    @property
    def has_prompts(self) -> bool:
        return self.host.prompt_tokens > 0


def mean_period(steps: Sequence[Step]) -> float:
    """Nanoseconds from one step's end to the next one's, as far as they followed on each other."""
    whole = [step.period for step in steps if step.period is not None]
    alone = [step.host.applied - step.host.begun for step in steps]
    return fmean(whole or alone) if steps else 0.0


def steps_of(traces: StepTraces) -> list[Step]:
    """Steps that every rank has written down whole, in order. Times of ranks are brought to the engine's clock."""
    found: list[Step] = []
    before: HostStep | None = None
    idle_since: int | None = None
    by_rank = [{step.step: step for step in rank.steps} for rank in traces.ranks]
    for host in traces.hosts:
        marks = [steps[host.step] for steps in by_rank if host.step in steps]
        if len(marks) == len(by_rank) and marks:
            ranks = [_rank_step(trace, step) for trace, step in zip(traces.ranks, marks, strict=True)]
            calls = _together([calls for _, calls in ranks])
            pause = None if before is None else max(0, host.begun - before.applied)
            period = None if before is None else host.applied - before.applied
            idle = None if idle_since is None else max(0, ranks[0][0].begun - idle_since)
            found.append(Step(host, [rank for rank, _ in ranks], calls, pause, period, idle))
            idle_since = ranks[0][0].ended
        else:
            idle_since = None
        before = host
        if not host.running and not host.waiting:
            before = idle_since = None
    return found


def _rank_step(trace: RankTrace, step: StepMarks) -> tuple[RankStep, list[Call]]:
    """A GPU's part of it begins with its first mark and ends with its last: before and behind, hosts work."""
    ahead, on_gpu = trace.ahead, trace.device != "cpu"
    begun = step.marks[0].time if on_gpu and step.marks else step.begun
    current = Slice(PREPARE, None, begun - ahead, 0)
    slices: list[Slice] = [] if on_gpu else [current]
    calls: list[Call] = []
    for mark in step.marks:
        time = mark.time - ahead
        if mark.what == PLACE:
            current.ended = time
            current = Slice(*_name(mark.value, trace.parts), time, 0)
            slices.append(current)
        elif mark.what == CALL_ENDS:
            calls[-1].left.append(time)
            current.called += time - calls[-1].came[0]
        else:
            kind = "all-reduce" if mark.what == ALL_REDUCE else "gather"
            calls.append(Call(kind, current.layer, current.name, mark.value, [time]))
    current.ended = current.begun if on_gpu else max(step.ended - ahead, current.begun)
    return RankStep(trace.rank, begun - ahead, current.ended, slices), calls


def _name(place: int, parts: list[tuple[str, str]]) -> tuple[str, int | None]:
    if place < 0:
        return _OUTSIDE.get(place, "other"), None
    if place // 2 >= len(parts):
        return "drafting", None
    mixer, ffn = parts[place // 2]
    return (_FFNS.get(ffn, ffn) if place % 2 else _MIXERS.get(mixer, mixer)), place // 2


def _together(calls: list[list[Call]]) -> list[Call]:
    """The same collective of all ranks as one: all make the same ones in the same order."""
    return [
        Call(
            group[0].kind,
            group[0].layer,
            group[0].part,
            group[0].size,
            [each.came[0] for each in group],
            [each.left[0] for each in group],
        )
        for group in zip(*calls, strict=True)
    ]


def effects_before_causes(steps: list[Step]) -> Iterator[tuple[Call, int]]:
    """Calls that a rank left before another had come, and by how much: clocks that are not aligned."""
    for step in steps:
        for call in step.calls:
            early = call.all_there - min(call.left)
            if early > 0:
                yield call, early


def unsure_clocks(traces: StepTraces) -> str:
    """Which ranks' clocks are not known well enough to say who came first, if any."""
    unsure = [
        f"rank {each.rank} to {each.uncertain / 1e3:,.0f} us" for each in traces.ranks if each.uncertain > ALIGNED_NS
    ]
    return f"Clocks are known only so well: {', '.join(unsure)}." if unsure else ""
