"""The command line: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.bench import bench
from phalanx.cli.calibrate import calibrate
from phalanx.cli.cluster import cluster
from phalanx.cli.compare import compare
from phalanx.cli.config import config
from phalanx.cli.doctor import doctor
from phalanx.cli.generate import generate
from phalanx.cli.gpus import gpus
from phalanx.cli.lab import lab
from phalanx.cli.models import models
from phalanx.cli.plan import plan
from phalanx.cli.pull import pull
from phalanx.cli.quantize import quantize
from phalanx.cli.serve import serve
from phalanx.cli.studio import studio
from phalanx.cli.trace import trace
from phalanx.cli.tune import tune
from phalanx.version import __version__

app = typer.Typer(
    help="Plan, serve and prove tensor-parallel LLM deployments.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(models)
app.command()(gpus)
app.command()(doctor)
app.command()(serve)
app.command()(pull)
app.command()(studio)
app.command()(generate)
app.command()(lab)
app.command()(trace)
app.command()(tune)
app.command()(calibrate)
app.command()(quantize)
app.command()(compare)
app.add_typer(bench, name="bench")
app.add_typer(config, name="config")
app.add_typer(cluster, name="cluster")


def _show_version(shown: bool) -> None:
    if shown:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Plan, serve and prove tensor-parallel LLM deployments."""
