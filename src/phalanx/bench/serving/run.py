"""`phalanx bench serve`, from its options to its results."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console

from phalanx.bench.serving.arrivals import arrival_times
from phalanx.bench.serving.client import Client, connect
from phalanx.bench.serving.datasets import make_workload
from phalanx.bench.serving.load import LoadRun
from phalanx.bench.serving.measure import LoadSummary, RequestTrace, summarise
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.progress import progress_of
from phalanx.bench.serving.report import record, tables
from phalanx.bench.serving.workload import QuerySet

_OTHER_FILES = 100


@dataclass(frozen=True)
class LoadOutcome:
    """What a run saw, and what a reader must know about it."""

    model: str
    traces: Sequence[RequestTrace]
    duration: float
    notes: list[str]


def run(options: Options) -> LoadSummary:
    """Measure, print, and write the files asked for. Ctrl-C ends the run with the results so far."""
    console = Console(highlight=False)
    _allow_sockets(options.max_concurrency or options.requests)
    outcome = asyncio.run(_measure(options, console))
    summary = summarise(outcome.traces, outcome.duration, options.bounds, options.ranks)
    notes = outcome.notes
    if summary.uncounted:
        notes = [*notes, f"{summary.uncounted} answers came without usage: their chunks with text count as tokens."]
    console.print(tables(options, outcome.model, summary, notes))
    if options.json_file is not None:
        written = msgspec.json.encode(record(options, outcome.model, summary, notes))
        options.json_file.write_bytes(msgspec.json.format(written, indent=1) + b"\n")
    if options.plot_file is not None:
        from phalanx.bench.serving.plot import save_plot

        save_plot(outcome.traces, f"{outcome.model}, {options.dataset}", options.plot_file)
    return summary


async def _measure(options: Options, console: Console) -> LoadOutcome:
    async with connect(options) as client:
        workload = await make_workload(options, client)
        notes = workload.notes + await _warm_up(options, client, workload, console)
        load = LoadRun(client, options.max_concurrency)
        times = arrival_times(options.requests, options.request_rate, options.gap_shape, options.seed)
        try:
            async with progress_of(load, client.model, options.requests, console):
                await load.run(workload.queries, times)
        except asyncio.CancelledError:
            notes.append(f"Interrupted: {len(load.finished)} of {options.requests} requests were finished and count.")
    return LoadOutcome(client.model, load.finished, load.duration, notes)


async def _warm_up(options: Options, client: Client, workload: QuerySet, console: Console) -> list[str]:
    """A note on what failed, if anything did."""
    if not workload.warmup:
        return []
    load = LoadRun(client, options.max_concurrency)
    async with progress_of(load, "warm-up", options.warmup, console):
        await load.run(workload.warmup, [0.0] * options.warmup)
    errors = [trace.error for trace in load.finished if trace.error is not None]
    return [f"{len(errors)} of {options.warmup} warm-up requests failed: {errors[0]}"] if errors else []


def _allow_sockets(count: int) -> None:
    """Each request in flight is an open file: raise the limit of this process, as far as is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard >= 0 else needed, hard))
