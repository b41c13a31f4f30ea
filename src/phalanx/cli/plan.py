"""`phalanx plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.shared import AsJson, told_errors
from phalanx.errors import ConfigError

_LINES_TOLD = 8
_WIDE = 180
"""Columns that a table of errors needs."""


def plan(
    model: Annotated[str | None, typer.Argument(help="Catalog name, config.json, folder or Hugging Face id.")] = None,
    machine: Annotated[
        str, typer.Option(help="Such as 4xH100-SXM, 2x8xH100-SXM, 4xDGX-Spark; several with commas.")
    ] = "",
    network: Annotated[str, typer.Option(help="Between boxes (2x8xH100-SXM): ib-ndr, roce-200, 10gbe.")] = "",
    isl: Annotated[int, typer.Option(help="Input tokens of a request.")] = 1024,
    osl: Annotated[int, typer.Option(help="Output tokens of a request.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests at once, over the whole machine.")] = 32,
    context: Annotated[
        int | None, typer.Option(help="Longest request to serve. Default: what the memory gives.")
    ] = None,
    slo: Annotated[str, typer.Option(help="Goals in ms: ttft:800,tpot:50 or p95-ttft:800,p99-tpot:60.")] = "",
    engine: Annotated[str, typer.Option(help="phalanx, vllm, sglang, trtllm; several with commas.")] = "",
    tp: Annotated[str, typer.Option(help="TP degrees to consider, such as 2,4,8. Default: all.")] = "",
    number_format: Annotated[str, typer.Option("--format", help="bf16, fp8, awq, ...; several with commas.")] = "",
    kv_format: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    state_dtype: Annotated[str, typer.Option(help="Recurrent states: auto (fp32), fp32 or bf16.")] = "auto",
    spread: Annotated[float, typer.Option(help="Lengths are this share shorter at most; 0: all alike.")] = 0.2,
    requests: Annotated[int | None, typer.Option(help="Requests to simulate. Default: ten a client.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, in place of --concurrency.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV or JSON lines of arrivals, in place of lengths.")] = None,
    shared_prefix: Annotated[int, typer.Option(help="First tokens that prompts of an agent share.")] = 0,
    agents: Annotated[int, typer.Option(help="Agents with a prefix each.")] = 1,
    electricity: Annotated[float, typer.Option(help="USD a kWh.")] = 0.12,
    years: Annotated[float, typer.Option(help="Years over which a purchase is written off.")] = 4.0,
    colocation: Annotated[float, typer.Option(help="USD a month for a kW housed and cooled by others.")] = 150.0,
    staff: Annotated[float, typer.Option(help="USD a month for people, where it is owned.")] = 0.0,
    residency: Annotated[float, typer.Option(help="USD a month for data that must stay in a country.")] = 0.0,
    system: Annotated[str, typer.Option("--os", help="linux, wsl2, windows or macos.")] = "linux",
    calibration: Annotated[Path | None, typer.Option(help="What phalanx doctor --measure saved of it.")] = None,
    speculate: Annotated[str, typer.Option(help="Tokens guessed ahead: off, mtp or ngram.")] = "off",
    speculate_tokens: Annotated[int, typer.Option(min=1, max=8, help="Most guesses a request and step.")] = 3,
    acceptance: Annotated[
        float | None, typer.Option(help="Share of guesses that come true. Default with mtp: as published.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Files to start it: shell, compose, systemd, k8s, ray.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the files of --recipe. Default: print them.")] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Predict every row of this CSV of measurements.")] = None,
    cross_validate: Annotated[int | None, typer.Option(help="With --evaluate: folds over whole series.")] = None,
    leave_out: Annotated[
        str | None, typer.Option(help="With --evaluate: a whole publisher, gpu or family at a time.")
    ] = None,
    beside: Annotated[list[Path] | None, typer.Option(help="With --leave-out: further files to fit.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the scaling curve; with --evaluate, of errors.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Memory, intervals, prices, what was left out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Does it fit, which TP, how fast, what it costs, and how to start it. Needs neither torch nor a GPU."""
    with told_errors():
        if evaluate is not None:
            _evaluate(evaluate, cross_validate, leave_out, beside or [], plot, as_json)
            return
        if not machine:
            raise ConfigError(
                "bad_option", "No machine is named.", "Such as: phalanx plan Llama-3.3-70B --machine 4xH100-SXM"
            )
        from phalanx.plan.ask import PlanQuestion, answer, compare, tell_what_fits

        question = PlanQuestion(
            model=model or "",
            machine=machine,
            input_tokens=isl,
            output_tokens=osl,
            concurrency=concurrency,
            slo=slo,
            engines=engine,
            tps=tp,
            formats=number_format,
            kv_format=kv_format,
            state_dtype=state_dtype,
            spread=spread,
            requests=requests,
            rate=rate,
            trace=trace,
            shared_prefix=shared_prefix,
            agents=agents,
            electricity=electricity,
            years=years,
            context=context,
            calibration=calibration,
            network=network,
            colocation=colocation,
            staff=staff,
            residency=residency,
            speculate=speculate,
            speculate_tokens=speculate_tokens,
            acceptance=acceptance,
            os=system,
        )
        if model is None:
            tell_what_fits(question, as_json)
        elif "," in machine:
            compare(question, as_json)
        else:
            answer(question, recipe=recipe, folder=output, as_json=as_json, in_full=explain, plot=plot)


def _lines(numbers: list[int]) -> str:
    """`line 3 is`, `lines 3, 4 and 17 more are`."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    told = ", ".join(map(str, numbers[:_LINES_TOLD]))
    more = len(numbers) - _LINES_TOLD
    return f"lines {told}{f' and {more} more' if more > 0 else ''} are"


def _evaluate(
    file: Path, folds: int | None, leave_out: str | None, beside: list[Path], plot: Path | None, as_json: bool
) -> None:
    from rich.console import Console

    from phalanx.plan.evaluate import draw, evaluate

    report = evaluate(file, folds, leave_out, beside)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        Console(width=max(Console().width, _WIDE)).print(report.table())
    for bad in report.bad:
        print(f"{file.name}, line {bad.line} is no measurement: {bad.problem}", file=sys.stderr)
    for problem in dict.fromkeys(row.problem for row in report.unpredicted):
        lines = [row.measurement.line for row in report.unpredicted if row.problem == problem]
        print(f"{file.name}, {_lines(lines)} not predicted: {problem}", file=sys.stderr)
    if report.bad or report.unpredicted:
        left = len(report.bad) + len(report.unpredicted)
        print(f"{left} of {len(report.rows) + len(report.bad)} rows left out.", file=sys.stderr)
    if plot is not None:
        draw(report, plot)
