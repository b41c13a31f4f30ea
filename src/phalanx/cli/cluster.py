"""`phalanx cluster`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.shared import AsJson, told_errors

if TYPE_CHECKING:
    from phalanx.cluster.commands import Command
    from phalanx.cluster.hosts import Cluster, Node

cluster = typer.Typer(
    help="Several machines as one: start Ray on them, see them, stop it, and write what they need.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Nodes = Annotated[Path, typer.Option("--nodes", help="The file that names the machines.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every command as it would be run, and run none.")]
HOSTS = Path("hosts.toml")


@cluster.command()
def up(nodes: Nodes = HOSTS, dry_run: DryRun = False) -> None:
    """Start Ray on every machine; those that are in the cluster already are left as they are."""
    with told_errors():
        from phalanx.cluster.commands import commands_of_up
        from phalanx.cluster.control import up as bring_up
        from phalanx.cluster.hosts import read_hosts

        told = read_hosts(nodes)
        if dry_run:
            _print_commands(told, commands_of_up(told))
            return
        for warning in bring_up(told, _sayer(told)):
            print(f"warning: {warning}", file=sys.stderr)
        _print_next(told)


@cluster.command()
def down(nodes: Nodes = HOSTS, dry_run: DryRun = False) -> None:
    """Stop this cluster's Ray processes, and no others."""
    with told_errors():
        from phalanx.cluster.commands import commands_of_down
        from phalanx.cluster.control import down as take_down
        from phalanx.cluster.hosts import read_hosts

        told = read_hosts(nodes)
        if dry_run:
            _print_commands(told, commands_of_down(told))
            return
        take_down(told, _sayer(told))


@cluster.command()
def status(
    nodes: Nodes = HOSTS,
    tp: Annotated[int | None, typer.Option(min=1, help="Show the ranks of this TP. Default: all there is.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every machine: is it up, its GPUs, its link, and the ranks that land there. Ends with 1 if one is not up."""
    with told_errors():
        from msgspec.json import encode
        from rich.console import Console

        from phalanx.cluster.hosts import read_hosts
        from phalanx.cluster.status import status as look
        from phalanx.cluster.status import table

        found = look(read_hosts(nodes), tp)
        if as_json:
            print(encode(found).decode())
        else:
            Console(width=max(Console().width, 120)).print(table(found))
        for problem in (found.problem, *(node.problem for node in found.nodes)):
            if problem and not as_json:
                print(f"\n{problem}", file=sys.stderr)
        if not found.is_up:
            raise typer.Exit(1)


@cluster.command()
def recipe(
    machine: Annotated[str, typer.Argument(help="Such as 4xDGX-Spark.")],
    model: Annotated[str | None, typer.Option(help="What to serve. Default: the largest that fits.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the files. Default: print them.")] = None,
) -> None:
    """Write network, limits, services, hosts.toml and the serve command, with the order of steps in README.md."""
    with told_errors():
        from phalanx.cluster.recipe import recipe as make
        from phalanx.plan.recipes import write_files

        made = make(machine, model)
        for warning in made.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if output is None:
            for name, text in made.files.items():
                print(f"# ---- {name}\n{text}")
            return
        write_files(made.files, output)
        print(f"{len(made.files)} files in {output} for {made.plan.model}. Start with {output / 'README.md'}.")


def _print_commands(told: Cluster, commands: list[Command]) -> None:
    from phalanx.cluster.commands import shown

    for command in commands:
        print(f"# {command.node.name}: {command.what}\n{shown(told, command)}")


def _sayer(told: Cluster) -> Callable[[Node, str], None]:
    width = max(len(node.name) for node in told.nodes)
    return lambda node, words: print(f"{node.name:{width}}  {words}", flush=True)


def _print_next(told: Cluster) -> None:
    from phalanx.cluster.commands import serve_environment, serve_options

    exports = " ".join(f"{name}={value}" for name, value in serve_environment(told).items())
    slots = sum(node.slots for node in told.nodes)
    print(f"\nUp: {len(told.nodes)} nodes, room for {slots} ranks. To serve, on {told.head.host}:")
    print(f"  {exports} \\\n  phalanx serve MODEL --tp {slots} {' '.join(serve_options(told))}")
