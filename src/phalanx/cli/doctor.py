"""`phalanx doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.shared import AsJson, told_errors
from phalanx.errors import ConfigError

_LIVE_STEPS, _LIVE_SECONDS = 32, 10.0

if TYPE_CHECKING:
    from phalanx.doctor.checks import Deployment
    from phalanx.doctor.facts import Facts


def doctor(
    model: Annotated[str | None, typer.Option(help="Check its deployment too: catalog name, folder or id.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that are to share the model.")] = 1,
    number_format: Annotated[str, typer.Option("--format", help="Of the weights. Default: the checkpoint's.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once that are expected.")] = 32,
    machine: Annotated[str, typer.Option(help="What the plan expects, such as 4xH100-SXM.")] = "",
    facts: Annotated[list[Path] | None, typer.Option(help="Judge a recorded machine; may be repeated.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write this machine's facts to a file.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure memory, matrix and all-reduce speed (seconds).")] = False,
    save_calibration: Annotated[Path | None, typer.Option(help="With --measure: for the planner to use.")] = None,
    url: Annotated[str, typer.Option(help="A server that runs here, to hold against the plan.")] = "",
    live: Annotated[str, typer.Option(help="A running Phalanx: why it is slow, by a trace and its last minute.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="A file with that server's key.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Another machine to try large frames to.")] = None,
    venv: Annotated[Path | None, typer.Option(help="The environment whose engines are meant. Default: this.")] = None,
    watch: Annotated[float, typer.Option(min=0, help="Seconds to watch the GPUs for, such as 60.")] = 0.0,
    install: Annotated[
        bool, typer.Option("--install-plan", help="Print driver, toolkit and environment steps for this system.")
    ] = False,
    engine: Annotated[str, typer.Option(help="With --install-plan: phalanx, vllm, sglang, trtllm.")] = "phalanx",
    everything: Annotated[bool, typer.Option("--all", help="Show what is fine as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is this machine what it should be: GPUs, links, power, versions, host, network. Exits 1 on errors."""
    with told_errors():
        from rich.console import Console

        from phalanx.doctor.checks import judge, judge_together
        from phalanx.doctor.report import TOGETHER, Verdict, about, has_errors, show, to_dict

        if live:
            _judge_live(live, api_key_file, as_json)
            return
        if facts and (record or measure or url or peer or watch or venv):
            raise ConfigError(
                "bad_option", "--facts judges what was recorded; nothing is read from this machine.", "Leave one out."
            )
        if save_calibration and not measure:
            raise ConfigError("bad_option", "--save-calibration needs numbers.", "Add --measure.")
        deployment = _deployment(model, tp, number_format, concurrency, machine)
        machines = (
            _recorded(facts) if facts else [_this_machine(peer or [], tp, measure, url, api_key_file, venv, watch)]
        )
        if install:
            from phalanx.doctor.install_plan import install_plan

            print("\n".join(install_plan(each, engine) for each in machines), end="")
            return
        if record is not None:
            from phalanx.doctor.gather import write_facts

            write_facts(facts=machines[0], path=record)
        verdicts = [
            Verdict(each.system.hostname, about(each), tuple(judge(each, _beside(deployment, each, machines))))
            for each in machines
        ]
        if len(machines) > 1:
            verdicts.append(Verdict(TOGETHER, "All of them together", tuple(judge_together(machines))))
        if as_json:
            print(json.dumps(to_dict(verdicts, machines)))
        else:
            show(verdicts, Console(highlight=False), everything)
        if save_calibration is not None:
            _save_calibration(machines[0], save_calibration)
        raise typer.Exit(1 if has_errors(verdicts) else 0)


def _judge_live(url: str, api_key_file: Path | None, as_json: bool) -> None:
    """What a trace shows comes first: it sees more. Of its last minute the server tells what the trace did not."""
    import msgspec
    from rich.console import Console

    from phalanx.doctor.live import causes_of, findings_of, picture_of
    from phalanx.doctor.report import show_findings
    from phalanx.doctor.running import fetch_notes, fetch_trace

    key = read_key(api_key_file)
    traces = fetch_trace(url, key, steps=_LIVE_STEPS, seconds=_LIVE_SECONDS)
    picture = picture_of(traces)
    found = causes_of(findings_of(picture), fetch_notes(url, key))
    if as_json:
        print(json.dumps({"picture": msgspec.to_builtins(picture), "findings": msgspec.to_builtins(found)}))
        return
    console = Console(highlight=False)
    show_findings(found, console)
    looked = f"{picture.steps} steps traced" if picture.steps else "no step ran in 10 s: ask it something meanwhile"
    console.print(f"{len(found)} finding{'' if len(found) == 1 else 's'}; {looked}.")


def _deployment(model: str | None, tp: int, number_format: str, concurrency: int, machine: str) -> Deployment | None:
    if model is None and tp == 1 and not machine:
        return None
    from phalanx.doctor.checks import Deployment
    from phalanx.models import catalog
    from phalanx.spec.machine import Machine

    return Deployment(
        tp=tp,
        model=model or "",
        spec=catalog.model(model) if model else None,
        number_format=catalog.check_format(number_format) if number_format else "",
        concurrency=concurrency,
        planned=Machine.parse(machine) if machine else None,
    )


def _beside(deployment: Deployment | None, facts: Facts, machines: list[Facts]) -> Deployment | None:
    """The same deployment, with the GPUs that other machines bring."""
    others = sum(len(each.gpus) for each in machines if each is not facts)
    return dataclasses.replace(deployment, elsewhere=others) if deployment else None


def _recorded(files: list[Path]) -> list[Facts]:
    from phalanx.doctor.gather import read_facts

    return [read_facts(file) for file in files]


def _this_machine(
    peers: list[str], tp: int, measured: bool, url: str, api_key_file: Path | None, venv: Path | None, watched: float
) -> Facts:
    import msgspec

    from phalanx.doctor.gather import gather

    facts = gather(peers, venv=venv)
    if watched:
        from phalanx.doctor.gather.watch import watch

        print(f"Watching the GPUs for {watched:g} s.", file=sys.stderr)
        facts = msgspec.structs.replace(facts, watched=watch(watched))
    if url:
        from phalanx.doctor.running import read_server

        serving = read_server(url, key=read_key(api_key_file), tp=tp if tp > 1 else None)
        facts = msgspec.structs.replace(facts, serving=serving)
    if measured:
        from phalanx.doctor.measure import measure

        found = measure(facts, progress=lambda words: print(words, file=sys.stderr))
        facts = msgspec.structs.replace(facts, measured=found)
    return facts


def _save_calibration(facts: Facts, path: Path) -> None:
    from phalanx.doctor.measure import save_calibration

    assert facts.measured is not None
    save_calibration(facts.measured, facts, path)


def read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return next(iter(file.read_text().split()), None)
    except OSError as error:
        raise ConfigError("bad_option", f"--api-key-file {file}: {error.strerror}.", "Give a readable file.") from None
