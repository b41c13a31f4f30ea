"""`phalanx trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.shared import Dtype, LoadFormat, Model, Tp, told_errors

if TYPE_CHECKING:
    from phalanx.engine.marks import StepTraces


def trace(
    model: Model = None,
    url: Annotated[str, typer.Option(help="A running server to trace, such as http://127.0.0.1:8000.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="A file with that server's key.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="--url: how long to wait for the steps.")] = 10.0,
    steps: Annotated[int, typer.Option(min=1, max=64, help="Steps to trace.")] = 8,
    read: Annotated[Path | None, typer.Option(help="Show a trace that was saved.")] = None,
    tp: Tp = 1,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once, without --url.")] = 4,
    isl: Annotated[int, typer.Option(min=1, help="Prompt tokens, without --url.")] = 64,
    prompts: Annotated[bool, typer.Option("--prompts", help="Trace from the prompts on, not decodes alone.")] = False,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    output: Annotated[Path, typer.Option(help="The file, for ui.perfetto.dev; .gz compresses it.")] = Path(
        "phalanx-trace.json"
    ),
) -> None:
    """Follow some steps over all ranks: what dominates, and a file for Perfetto."""
    with told_errors():
        from rich.console import Console

        from phalanx.doctor.live import findings_of, picture_of
        from phalanx.doctor.report import show_findings
        from phalanx.trace import perfetto
        from phalanx.trace.summary import show
        from phalanx.trace.timeline import steps_of, unsure_clocks

        console = Console(highlight=False)
        slowdown = None
        if read is not None:
            traces = perfetto.read(read)
        elif url:
            traces = _of_server(url, api_key_file, steps, seconds)
        else:
            traces, slowdown = _of_batch(model, tp, dtype, load_format, batch, isl, steps, prompts, console)
        show(steps_of(traces), console)
        show_findings(findings_of(picture_of(traces)), console)
        if unsure := unsure_clocks(traces):
            console.print(unsure)
        if slowdown is not None:
            console.print(f"Traced steps took {slowdown:.3f} times as long as those between them.")
        if read is None:
            size = perfetto.save(output, traces)
            console.print(f"Written to {output} ({size / 1e6:.1f} MB): open it at https://ui.perfetto.dev")


def _of_server(url: str, key_file: Path | None, steps: int, seconds: float) -> StepTraces:
    from phalanx.cli.doctor import read_key
    from phalanx.doctor.running import fetch_trace

    return fetch_trace(url, read_key(key_file), steps, seconds)


def _of_batch(
    model: str | None,
    tp: int,
    dtype: str,
    load_format: str,
    batch: int,
    inputs: int,
    steps: int,
    prompts: bool,
    console: object,
) -> tuple[StepTraces, float | None]:
    from rich.console import Console

    from phalanx.bench.traced import trace_batch
    from phalanx.runtime.config import EngineConfig

    assert isinstance(console, Console)
    config = EngineConfig(model=model, tp=tp, dtype=dtype, load_format=load_format)
    with console.status("Loading") as status:
        found = trace_batch(config, batch, inputs, steps, prompts, status.update)
    return found.traces, found.slowdown
