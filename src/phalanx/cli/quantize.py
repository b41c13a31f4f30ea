"""`phalanx quantize`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.compare import tell
from phalanx.cli.shared import AsJson, told_errors

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from phalanx.weights.quantize import QuantizedCheckpoint

_LAYERS_SHOWN = 8


def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder (safetensors) or Hugging Face id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must be new.")],
    number_format: Annotated[
        str, typer.Option("--format", help="fp8-block (128 x 128), fp8-channel, awq, w4a16 or mxfp4.")
    ] = "fp8-block",
    calibration: Annotated[
        Path | None, typer.Option(help="A text that awq's scales go by; default: what the model says by itself.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="A text to hold the new checkpoint against the old one by.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model's linear layers in FP8 or four bits, in a form that vLLM, SGLang and transformers load too."""
    with told_errors(), _tidy_when_told_to_end():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        from phalanx.bench.quality import Comparison, compare_checkpoints, read_text
        from phalanx.weights.checkpoint import locate
        from phalanx.weights.quantize import new_folder
        from phalanx.weights.quantize import quantize as run

        new_folder(output)
        text = read_text(check) if check is not None else None
        inputs = _inputs(model, calibration) if number_format == "awq" else None
        columns = ("Quantizing", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("")

            def progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            report = run(locate(model), output, number_format, progress, inputs)
        checked = (
            compare_checkpoints(Comparison(model, str(output), answer_tokens=0), [text]) if text is not None else None
        )
        if as_json:
            print(json.dumps(report.to_dict() | ({"check": checked.to_dict()} if checked else {})))
            return
        Console(highlight=False).print(_table(report))
        print(f"{report.bytes_before / 1e9:.2f} GB -> {report.bytes_after / 1e9:.2f} GB in {output}")
        if report.uneven:
            print(
                f"{len(report.uneven)} matrices have a side that 128 does not divide, such as {report.uneven[0]}. "
                "Phalanx loads them at any TP; vLLM and transformers may not: for those use --format fp8-channel.",
                file=sys.stderr,
            )
        if checked is not None:
            tell(checked, as_json=False)


@contextmanager
def _tidy_when_told_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does: what is unfinished is taken away first."""
    before = {each: signal.signal(each, _leave) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _inputs(model: str, calibration: Path | None) -> dict[str, Tensor]:
    """What the model's linear layers are given over the text."""
    from phalanx.bench.activations import collect
    from phalanx.bench.quality import read_text
    from phalanx.weights.checkpoint import locate

    text = read_text(calibration) if calibration is not None else None
    return collect(locate(model), text)


def _table(report: QuantizedCheckpoint) -> Table:
    """The layers that lost most."""
    from rich.table import Table

    layers = sorted(report.layers(), key=lambda layer: -layer[2].relative)
    table = Table(title=f"Relative error, worst {min(_LAYERS_SHOWN, len(layers))} of {len(layers)} layers", box=None)
    for heading in ("layer", "mean", "worst", "in", "largest change"):
        table.add_column(heading, justify="left" if heading in ("layer", "in") else "right")
    for layer, mean, worst in layers[:_LAYERS_SHOWN]:
        where = worst.name.removeprefix(f"{layer}.").removesuffix(".weight")
        table.add_row(layer, f"{mean:.2%}", f"{worst.relative:.2%}", where, f"{worst.largest:.2g}")
    return table
