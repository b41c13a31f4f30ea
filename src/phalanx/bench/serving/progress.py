"""What a person sees while a run lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phalanx.bench.serving.load import LoadRun

_EVERY = 0.5


@asynccontextmanager
async def progress_of(load: LoadRun, title: str, total: int, console: Console) -> AsyncIterator[None]:
    """A bar that looks at the load twice a second; nothing where the output is no terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(title, total=total, rates="")

        async def watch() -> None:
            while True:
                bar.update(task, completed=len(load.finished), rates=_rates(load), refresh=True)
                await asyncio.sleep(_EVERY)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


def _rates(load: LoadRun) -> str:
    """Failures, and tokens a second: as counted by the server when an answer is finished, until then by its chunks."""
    tokens = sum(trace.tokens for trace in (*load.finished, *load.running))
    failed = sum(trace.error is not None for trace in load.finished)
    return f"{failed} failed  {tokens / max(load.duration, 1e-9):,.0f} tok/s"
