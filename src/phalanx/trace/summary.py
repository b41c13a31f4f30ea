"""What dominates: the parts of a step in sum and by layer, over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from phalanx.trace.timeline import Step, mean_period

WAIT, EXCHANGE, SCHEDULE, PAUSE = "waiting for a rank", "exchange", "schedule and book", "between steps"
_MS = 1e-6


@dataclass(frozen=True)
class PartTime:
    """Milliseconds a step: the mean over ranks, and those of the rank that has most of it."""

    name: str
    mean: float
    most: float
    rank: int | None


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds a step in one layer, by the mean of ranks: mixer, FFN, waiting for the last rank, exchange."""

    layer: int
    mixer: float
    ffn: float
    wait: float
    exchange: float

    @property
    def total(self) -> float:
        return self.mixer + self.ffn + self.wait + self.exchange


@dataclass(frozen=True)
class Summary:
    """`period` is from one step's end to the next one's, in ms, the mean, as are all parts. Parts by their time, layers
    in order.
    `waits` holds who was waited for: rank -> ms a step that all others lost to it together.
    """

    steps: int
    ranks: int
    period: float
    parts: list[PartTime]
    layers: list[LayerTime]
    calls: int
    call_bytes: int
    waits: dict[int, float]

    def of(self, *names: str) -> float:
        return sum(part.mean for part in self.parts if part.name in names)


def summarise(steps: Sequence[Step]) -> Summary:
    by_rank = _by_rank(steps)
    parts = [_part(name, times) for name, times in by_rank.items()]
    if steps:
        parts.append(PartTime(SCHEDULE, *_same(_mean(_host(step) for step in steps)), None))
        parts.append(PartTime(PAUSE, *_same(_mean(step.pause for step in steps if step.pause is not None)), None))
    return Summary(
        steps=len(steps),
        ranks=len(steps[0].ranks) if steps else 0,
        period=mean_period(steps) * _MS,
        parts=sorted(parts, key=lambda part: -part.mean),
        layers=_layers(steps),
        calls=round(_mean((len(step.calls) for step in steps), 1.0)),
        call_bytes=round(_mean((sum(call.size for call in step.calls) for step in steps), 1.0)),
        waits=_waits(steps),
    )


def _same(value: float) -> tuple[float, float]:
    return value, value


def _mean(values: Iterable[int], scale: float = _MS) -> float:
    found = list(values)
    return fmean(found) * scale if found else 0.0


def _host(step: Step) -> int:
    """Of the engine alone: choosing the step, and booking its tokens."""
    host = step.host
    return host.scheduled - host.begun + host.applied - host.collected


def _by_rank(steps: Sequence[Step]) -> dict[str, dict[int, float]]:
    """Milliseconds a step of each part on each rank; what collectives take is told apart from the parts they are in."""
    found: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    share = _MS / max(len(steps), 1)
    for step in steps:
        for rank in step.ranks:
            for part in rank.slices:
                found[part.name][rank.rank] += part.own * share
        for call in step.calls:
            for number in range(len(call.came)):
                found[WAIT][number] += call.waited(number) * share
                found[EXCHANGE][number] += call.exchanged(number) * share
    return {name: dict(times) for name, times in found.items()}


def _part(name: str, times: dict[int, float]) -> PartTime:
    rank = max(times, key=lambda each: times[each])
    return PartTime(name, fmean(times.values()), times[rank], rank if len(times) > 1 else None)


def _layers(steps: Sequence[Step]) -> list[LayerTime]:
    columns: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * 4)
    for step in steps:
        share = _MS / len(steps) / len(step.ranks)
        for rank in step.ranks:
            seen: set[int] = set()
            for part in rank.slices:
                if part.layer is not None:
                    columns[part.layer][part.layer in seen] += part.own * share
                    seen.add(part.layer)
        for call in step.calls:
            if call.layer is not None:
                for number in range(len(call.came)):
                    columns[call.layer][2] += call.waited(number) * share
                    columns[call.layer][3] += call.exchanged(number) * share
    return [LayerTime(layer, *times) for layer, times in sorted(columns.items())]


def _waits(steps: Sequence[Step]) -> dict[int, float]:
    found: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        for call in step.calls:
            found[call.last] += sum(map(call.waited, range(len(call.came)))) * _MS / len(steps)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def by_kind(steps: Sequence[Step]) -> dict[str, Summary]:
    """Of steps that only decode and of those with prompts, where there are some."""
    kinds = {"decode": False, "prompt": True}
    found = {kind: [step for step in steps if step.has_prompts == prompts] for kind, prompts in kinds.items()}
    return {kind: summarise(each) for kind, each in found.items() if each}


def show(steps: Sequence[Step], console: Console) -> None:
    """What dominates, for decodes and for steps with prompts."""
    if not steps:
        console.print("No step ran while it was traced.")
    for kind, summary in by_kind(steps).items():
        _show(kind, summary, console)


def _show(kind: str, summary: Summary, console: Console) -> None:
    """The parts first, then the layers that take most, then who was waited for."""
    console.print(_parts_table(kind, summary))
    console.print(_layers_table(summary))
    lost = {rank: ms for rank, ms in summary.waits.items() if ms >= 0.005}
    if lost:
        told = ", ".join(f"rank {rank} {ms:.2f} ms" for rank, ms in lost.items())
        console.print(f"Time of others lost to who came last, a step: {told}.", highlight=False)


def _parts_table(kind: str, summary: Summary) -> Table:
    calls = f"; {summary.calls} collectives, {summary.call_bytes / 1024:,.0f} KiB a rank" if summary.call_bytes else ""
    steps, ranks = _counted(summary.steps, f"{kind} step"), _counted(summary.ranks, "rank")
    title = f"{steps} on {ranks}, {summary.period:.2f} ms on average{calls}"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for name in ("ms a step", "of it", "most", "on rank"):
        table.add_column(name, justify="right")
    for part in summary.parts:
        if part.mean >= 0.0005:
            share = part.mean / summary.period if summary.period else 0.0
            rank = "" if part.rank is None else str(part.rank)
            table.add_row(part.name, f"{part.mean:.3f}", f"{share:.1%}", f"{part.most:.3f}", rank)
    return table


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _layers_table(summary: Summary, most: int = 5) -> Table:
    """The slowest layers, and the median of all."""
    table = Table(title="by layer, ms a step", title_justify="left")
    for name in ("layer", "mixer", "FFN", "waiting", "exchange", "total"):
        table.add_column(name, justify="right")
    slowest = sorted(summary.layers, key=lambda each: -each.total)[:most]
    for each in slowest:
        times = (each.mixer, each.ffn, each.wait, each.exchange, each.total)
        table.add_row(str(each.layer), *(f"{ms:.3f}" for ms in times))
    if len(summary.layers) > most:
        columns = ("mixer", "ffn", "wait", "exchange", "total")
        middle = (median(getattr(each, name) for each in summary.layers) for name in columns)
        table.add_row(f"median of {len(summary.layers)}", *(f"{ms:.3f}" for ms in middle))
    return table
