"""`phalanx lab`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.shared import Dtype, KvCacheDtype, LoadFormat, Model, StateDtype, told_errors


def lab(
    model: Model = None,
    tp: Annotated[str | None, typer.Option(help="Degrees, as 2,4,8. Default: what the machine has.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Requests at once. Default: 32, on CPUs 4.")] = None,
    isl: Annotated[int | None, typer.Option(min=1, help="Prompt tokens. Default: 1024, on CPUs 64.")] = None,
    osl: Annotated[int | None, typer.Option(min=2, help="Answer tokens. Default: 256, on CPUs 16.")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Decode steps to time at least. Default: 100, on CPUs 12.")
    ] = None,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Steps before that. Default: 20, on CPUs 2.")] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="One rank's share on one device, others modelled.")
    ] = False,
    machine: Annotated[str | None, typer.Option(help="The GPU whose fabric to model. Default: this one.")] = None,
    all_reduce_us: Annotated[float | None, typer.Option(help="--emulate: microseconds a collective takes.")] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="Of a GPU. Default: median rent, where known.")] = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    state_dtype: StateDtype = "auto",
    load_format: LoadFormat = "auto",
    output: Annotated[Path, typer.Option(help="Folder for lab.md, lab.json and lab.png.")] = Path("phalanx-lab"),
    source: Annotated[
        Path | None, typer.Option("--from", help="Show and draw an earlier lab.json; nothing is measured.")
    ] = None,
) -> None:
    """Measure which TP a model should have here: speed, scaling, waiting, cost and room at each, and a verdict."""
    with told_errors():
        from rich.console import Console

        from phalanx.bench.lab.experiment import Experiment, run_lab
        from phalanx.bench.lab.files import read_lab, write_lab
        from phalanx.bench.lab.report import remarks, table
        from phalanx.bench.lab.verdict import verdicts
        from phalanx.runtime.config import EngineConfig

        console = Console()
        config = EngineConfig(
            model=model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, state_dtype=state_dtype, load_format=load_format
        )
        asked = Experiment(
            config, tp, batch, isl, osl, iterations, warm_up, emulate, machine, all_reduce_us, usd_per_hour
        )  # fmt: skip
        with console.status("Looking") as status:
            found = run_lab(asked, status.update) if source is None else read_lab(source)
        console.print(table(found))
        for use, told in verdicts(found.points, found.on_gpus).items():
            console.print(f"{use}: {told}", highlight=False)
        for remark in remarks(found):
            console.print(remark, highlight=False)
        written = write_lab(found, output)
        if "lab.png" not in written:
            console.print(
                f"There is no picture without matplotlib. Where it is installed, draw with: phalanx lab --from "
                f"{output / 'lab.json'}",
                highlight=False,
            )
        console.print(f"Written to {output}: {', '.join(written)}", highlight=False)
