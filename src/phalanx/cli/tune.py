"""`phalanx tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.shared import Model, told_errors

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.plan.goodput import Traffic
    from phalanx.plan.tuning import Rung


def tune(
    model: Model = None,
    machine: Annotated[str, typer.Option(help="To plan for, such as 8xH100-SXM. Default: this one.")] = "",
    planned: Annotated[bool, typer.Option("--plan", help="In virtual time alone, as with --machine.")] = False,
    isl: Annotated[int | None, typer.Option(min=1, help="Prompt tokens. Default: 1024, to try it here 64.")] = None,
    osl: Annotated[int | None, typer.Option(min=1, help="Answer tokens. Default: 256, to try it here 16.")] = None,
    spread: Annotated[float, typer.Option(min=0, max=0.99, help="Lengths vary from (1 - this) of that.")] = 0.5,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Lengths and arrivals: CSV or JSON lines.")] = None,
    slo: Annotated[str, typer.Option(help="In ms, such as p95-ttft:800,tpot:50.")] = "p95-ttft:5000,tpot:500",
    same_answers: Annotated[bool, typer.Option("--same-answers", help="Leave precision as it is.")] = False,
    from_static: Annotated[
        bool, typer.Option("--from-static", help="--plan: begin with static batches, as a model of them.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="For real: about what one run takes.")] = 3.0,
    budget: Annotated[float, typer.Option(min=1, help="For real: seconds for all of it, loading included.")] = 90.0,
    output: Annotated[Path, typer.Option(help="Folder for tune.json, tune.png and serve.toml.")] = Path("phalanx-tune"),
) -> None:
    """Find the options with the most goodput an SLO allows: lever by lever in virtual time, then the few for real."""
    with told_errors():
        from rich.console import Console

        from phalanx.plan.goodput import Traffic
        from phalanx.plan.slo import Slo
        from phalanx.plan.traffic import read_trace
        from phalanx.spec.workload import Workload

        arrivals = read_trace(trace) if trace is not None else ()
        small = not machine
        load = Workload(
            isl or (64 if small else 1024), osl or (16 if small else 256), spread=spread, shared_prefix=shared_prefix,
            trace=arrivals,
        )  # fmt: skip
        traffic, console = Traffic(load, Slo.parse(slo)), Console(highlight=False)
        if machine:
            rungs, own_format = _plan(model, machine, traffic, same_answers, from_static, console)
        else:
            rungs, own_format = _measure(model, traffic, seconds, budget, planned, console)
        how = "in virtual time" if machine or planned else "measured"
        _write(output, rungs, model, own_format, traffic, slo, how, console)


def _plan(
    model: str | None, machine: str, traffic: Traffic, same_answers: bool, from_static: bool, console: Console
) -> tuple[list[Rung], str]:
    from phalanx.errors import ConfigError
    from phalanx.models import catalog
    from phalanx.plan.goodput import PlannedRun
    from phalanx.plan.tuning import Setting, caching, climb, precision, scheduling, spread_out
    from phalanx.spec.machine import Machine

    if model is None:
        raise ConfigError("bad_option", "To plan for a machine, name a model.", "Such as Llama-3.3-70B.")
    spec, gpus = catalog.model(model), Machine.parse(machine)
    judge = PlannedRun(spec, gpus, traffic)
    splits = [(tp, gpus.most_replicas(tp)) for tp in (1, 2, 4, 8, 16) if tp <= len(gpus) and gpus.most_replicas(tp)]
    own = spec.number_format
    levers = [*scheduling(), *([caching()] if traffic.load.shared_prefix else [])]
    if not same_answers:
        levers += precision([each for each in ("fp8", "int4") if own in ("bf16", "fp16")], ["fp8"])
    levers += [spread_out(splits), *scheduling()[1:]]
    tp = max(degree for degree, _ in splits)
    start = Setting(tp=tp, replicas=gpus.most_replicas(tp), weights=own, admission="static" if from_static else "fair")
    with console.status("Looking") as status:
        return climb(start, levers, judge, status.update), own


def _measure(
    model: str | None, traffic: Traffic, seconds: float, budget: float, planned: bool, console: Console
) -> tuple[list[Rung], str]:
    import time
    from dataclasses import replace

    from phalanx.bench.tuning import Bench, tune_for_real
    from phalanx.bench.waterfall import table
    from phalanx.plan.goodput import Priced
    from phalanx.plan.tuning import Setting, caching, climb, scheduling
    from phalanx.runtime.config import EngineConfig
    from phalanx.runtime.held import held_weights
    from phalanx.runtime.rank import pick_device
    from phalanx.weights.checkpoint import Checkpoint, locate

    checkpoint = Checkpoint(locate(model))
    config = EngineConfig(model=model, max_num_seqs=32, max_num_batched_tokens=2048)
    scheme = held_weights(config, checkpoint, pick_device(config, 0)).scheme
    own = checkpoint.spec.number_format if scheme is None else scheme.format.name
    start = Setting(weights=own, kv=checkpoint.spec.dtype, max_num_seqs=4, max_num_batched_tokens=512)
    with console.status("Loading") as status:
        bench = Bench(config, traffic, seconds, time.monotonic() + budget, status.update)
        price, kv_tokens = bench.price(replace(start, max_num_seqs=16))
        judge = Priced(price, kv_tokens, traffic)
        known = [*scheduling(32, 2048)[1:], *([caching()] if traffic.load.shared_prefix else [])]
        rungs = climb(start, known, judge, status.update)
        if planned:
            return rungs, own
        console.print(table("In virtual time, by the price of steps measured here", rungs))
        best = rungs[-1].setting
        levers = [] if best == start else [("as in virtual time", best)]
        return tune_for_real(bench, start, [*levers, ("speculation", replace(best, speculate="ngram"))]), own


def _write(
    output: Path,
    rungs: list[Rung],
    model: str | None,
    own: str,
    traffic: Traffic,
    slo: str,
    how: str,
    console: Console,
) -> None:
    import json
    from dataclasses import asdict
    from importlib.util import find_spec

    from phalanx.bench.waterfall import config_toml, save_plot, table

    best = rungs[-1]
    load = traffic.load
    name = model or "SmolLM2-135M-Instruct"
    lengths = f"{load.mean_input:.0f} tokens in and {load.mean_output:.0f} out on average"
    title = f"{name}, {how}: {lengths}, {load.shared_prefix} shared; {slo} ms"
    console.print(table(title, rungs))
    if best.value.problem:
        console.print(f"Nothing that was tried serves this: {best.value.problem}. Loosen the SLO or shorten requests.")
    output.mkdir(parents=True, exist_ok=True)
    note = f"{best.value.goodput:,.0f} output tokens/s within {slo} ms, {how} by phalanx tune"
    (output / "serve.toml").write_text(config_toml(best.setting, model, own, load.longest, note), encoding="utf-8")
    (output / "tune.json").write_text(json.dumps([asdict(rung) for rung in rungs], indent=1) + "\n")
    drawn = find_spec("matplotlib") is not None
    if drawn:
        save_plot(title, rungs, output / "tune.png")
    console.print(f"Written to {output}: serve.toml, tune.json{', tune.png' if drawn else ''}")
    console.print(f"phalanx serve --config {output / 'serve.toml'}")
