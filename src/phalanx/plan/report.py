"""A plan as tables for a person."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.plan.candidates import ANY_SPEED, Candidate, Excluded, Plan
from phalanx.plan.collectives import all_reduce_lines
from phalanx.plan.engines import GIB, MIB
from phalanx.plan.explain import advice, day, explain, gpus_needed, nearest, verdict
from phalanx.plan.measured import calibration_lines
from phalanx.plan.predict import Interval, percentile
from phalanx.plan.recipes import WAYS, command, wrapped
from phalanx.plan.record import SHARES, launch_of

_SHOWN = 8
_EXCLUDED_SHOWN = 6
_NARROW = 6
"""Characters of TP and replicas beside which a table of 80 columns has room for spaces."""


def show(plan: Plan, console: Console, in_full: bool = False) -> None:
    """Print the plan for a person: the answer, the command, one table; all the rest when asked for."""
    best = plan.best
    console.print(Text(verdict(plan), style="bold" if best else "bold red"))
    for line in [*calibration_lines(plan), *(gpus_needed(plan) if best is None else advice(plan))]:
        console.print(Text(line, style="yellow"))
    if best is not None:
        _show_launch(plan, best, console)
        console.print(_ranking(plan))
        console.print(_percentiles(best))
        console.print(day(plan), highlight=False)
    if in_full:
        _show_all(plan, console)
    elif best is None:
        _show_excluded(plan, console)
    else:
        console.print("Memory, intervals, prices and what was left out: --explain", style="dim")


def _show_all(plan: Plan, console: Console) -> None:
    best = plan.best
    console.print(_headline(plan))
    if best is not None:
        console.print(explain(plan), highlight=False)
        console.print(_side_by_side(plan))
        for line in all_reduce_lines(plan):
            console.print(line, highlight=False)
        console.print(_arithmetic(best))
        if plan.machine.is_mixed and best.replicas > 1:
            console.print(
                f"note: Replicas differ: times are of the slowest, {best.group.name}, memory of the smallest."
            )
        for note in best.fit.notes:
            console.print(f"note: {note}", highlight=False)
        console.print(_money(plan, best), highlight=False)
    _show_excluded(plan, console)


def _show_launch(plan: Plan, best: Candidate, console: Console) -> None:
    launch = launch_of(plan, best)
    if launch.prompt_replicas:
        console.print(
            f"{launch.prompt_replicas} of {launch.replicas} replicas compute prompts alone and send their KV to the "
            "others: --recipe shell has the files."
        )
        return
    if launch.spans_machines:
        own = launch.engine.name == "phalanx" and launch.one_gpu_machines
        way = f"phalanx cluster recipe {launch.machine.name}" if own else f"--recipe {WAYS[launch.engine.name][0]}"
        console.print(f"The ranks are on several machines: {way} has the files.")
        if launch.note:
            console.print(launch.note)
        return
    print()
    if launch.prepare:
        print(wrapped(list(launch.prepare)))
    print(wrapped(command(launch)))
    print()
    if launch.note:
        console.print(launch.note)
    why = "as asked" if plan.asks_context else "what the memory gives; --context sets another"
    if launch.max_model_len == plan.spec.max_positions and not plan.asks_context:
        why = "all that the model was made for"
    console.print(f"It serves requests of up to {launch.max_model_len:,} tokens: {why}.")
    if launch.replicas > 1:
        console.print(f"and {launch.replicas - 1} more like it; --recipe shell, compose, systemd or k8s has the files")


def _headline(plan: Plan) -> Text:
    spec, workload = plan.spec, plan.workload
    active = f", {spec.active_parameters / 1e9:.1f} B active" if spec.moe else ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(cache.kind for cache in spec.caches).items())
    if workload.trace:
        traffic = f"trace of {len(workload.trace)} requests"
    elif workload.rate is not None:
        traffic = f"{workload.input_tokens} in, {workload.output_tokens} out, {workload.rate:g} requests/s"
    else:
        traffic = f"{workload.input_tokens} in, {workload.output_tokens} out, {workload.concurrency} at once"
    if workload.shared_prefix:
        traffic += f", {workload.shared_prefix} shared by {workload.agents} agents"
    if workload.acceptance is not None:
        traffic += f", up to {workload.drafts} drafts of which {workload.acceptance:.0%} come true"
    text = Text()
    text.append(plan.model, style="bold")
    text.append(
        f"  {spec.parameters / 1e9:.1f} B{active}, {len(spec.layers)} layers ({kinds}), "
        f"KV {spec.kv_bytes_per_token() / 1024:.0f} KiB a token in bf16\n"
    )
    text.append(plan.machine.name, style="bold")
    text.append(f"  {traffic}")
    return text


def _table(title: str, spaces: int = 1) -> Table:
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": SIMPLE_HEAD}
    return Table(title=title, min_width=len(title) + 2, padding=(0, spaces, 0, 0), **style)


def _ranking(plan: Plan) -> Table:
    ways = [f"{each.degrees} x {each.replicas}" for each in plan.candidates[:_SHOWN]]
    spaces = 1 if max(map(len, ways), default=0) <= _NARROW else 0
    table = _table("Ranking: SLO first, then tokens a second and GPU", spaces)
    for name in ("SLO", "engine", "format", "TP x n", "TTFT ms", "TPOT ms", "tok/s", "per GPU", "$/M tok"):
        table.add_column(name, justify="left" if name in ("SLO", "engine", "format") else "right", no_wrap=True)
    for each, way in zip(plan.candidates, ways, strict=False):
        table.add_row(
            _verdict(plan, each),
            each.engine.title,
            each.weight_format,
            way,
            f"{each.prediction.ttft.mid * 1e3:,.0f}",
            f"{each.prediction.tpot.mid * 1e3:.1f}",
            f"{each.throughput:,.0f}",
            f"{each.per_gpu:,.0f}",
            _usd(each.usd_per_million),
        )
    if len(plan.candidates) > _SHOWN:
        table.caption = f"{len(plan.candidates) - _SHOWN} more with --json"
    return table


def _percentiles(best: Candidate) -> Table:
    table = Table("", "mean", *(f"p{100 * share:g}" for share in SHARES), box=None, padding=(0, 2, 0, 0))
    prediction = best.prediction
    for name, mean, seen, digits in (
        ("TTFT ms", prediction.ttft.mid, prediction.requests_ttft, 0),
        ("TPOT ms", prediction.tpot.mid, prediction.requests_tpot, 1),
    ):
        values = (mean, *(percentile(seen, share) for share in SHARES))
        table.add_row(name, *(f"{value * 1e3:,.{digits}f}" for value in values))
    return table


def _verdict(plan: Plan, candidate: Candidate) -> str:
    if not candidate.is_held:
        return "[red]less[/]"
    if plan.slo == ANY_SPEED:
        return "-"
    return "[green]ok[/]" if plan.meets(candidate) else "[red]slow[/]"


def _interval(interval: Interval, scale: float, digits: int) -> str:
    low, mid, high = (f"{value * scale:,.{digits}f}" for value in (interval.low, interval.mid, interval.high))
    return f"{mid}\n[dim]{low}-{high}[/]"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _side_by_side(plan: Plan) -> Table:
    """The winner beside the powers of two, each with the interval that holds nine times in ten."""
    best = plan.best
    assert best is not None
    shown = [each for each in plan.side_by_side if each.tp & (each.tp - 1) == 0 or each.tp == best.tp]
    table = _table(f"{best.engine.title} {best.weight_format} by TP x replicas, below each the 90 % interval")
    table.add_column("")
    for each in shown:
        table.add_column(f"{each.tp} x {each.replicas}", justify="right", no_wrap=True)
    predictions = [each.prediction for each in shown]
    table.add_row("TTFT ms", *(_interval(each.ttft, 1e3, 0) for each in predictions))
    table.add_row("TPOT ms", *(_interval(each.tpot, 1e3, 1) for each in predictions))
    for share in SHARES:
        label = f"p{100 * share:g}"
        table.add_row(f"TTFT {label}", *(f"{percentile(each.requests_ttft, share) * 1e3:,.0f}" for each in predictions))
        table.add_row(f"TPOT {label}", *(f"{percentile(each.requests_tpot, share) * 1e3:,.1f}" for each in predictions))
    table.add_row("tok/s", *(_interval(each.prediction.throughput, each.copies, 0) for each in shown))
    table.add_row("per GPU", *(f"{each.per_gpu:,.0f}" for each in shown))
    table.add_row("scaling", *(f"{plan.scaling(each):.0%}" for each in shown))
    table.add_row("all-reduce", *(f"{each.all_reduce_share:.0%} of a step" for each in predictions))
    table.add_row("weights", *(f"{each.fit.tightest.weight_bytes / GIB:.1f} GiB" for each in shown))
    table.add_row("KV tokens", *(f"{each.fit.kv_tokens:,}" for each in shown))
    return table


def _arithmetic(best: Candidate) -> Table:
    fit = best.fit
    tight = fit.tightest
    which = "every rank" if len({rank.kv_bytes for rank in fit.ranks}) == 1 else f"rank {tight.rank}, the tightest"
    table = _table(f"Memory of {which}")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("how")
    for line in tight.lines:
        table.add_row(line.what, f"{line.bytes / GIB:+.2f}", line.how)
    if len(fit.request_bytes) > 1:
        kept = ", ".join(f"{size / MIB:.1f} MiB in {kind} layers" for kind, size in fit.request_bytes.items())
        table.add_row("a request keeps", "", kept)
    per_token = fit.kv_bytes_per_token
    table.add_row(
        "left for KV",
        f"{tight.kv_bytes / GIB:.2f}",
        f"/ {per_token:,.0f} B a token ({fit.kv_format}) = {fit.kv_tokens:,} tokens = "
        f"{fit.max_sequences} requests of {fit.context:,}; longest context {fit.longest_context:,}",
        style="bold",
    )
    return table


def _money(plan: Plan, best: Candidate) -> str:
    cost, power = best.cost, plan.power
    assert power is not None
    parts = []
    if cost.rent:
        low, median, high = cost.rent
        parts.append(f"rent {median:.2f} $/h ({low:.2f}-{high:.2f}), reserved about {cost.reserved:.2f}")
    if cost.owned is not None:
        bought = f" (purchase {cost.purchase:,.0f} $)" if cost.purchase else ""
        parts.append(f"owned {cost.owned:.2f} $/h over {plan.tariff.years:g} years{bought}")
    if cost.break_even is not None:
        parts.append(
            f"owning pays from {24 * cost.break_even:.1f} hours a day on"
            if cost.break_even <= 1
            else "renting is cheaper at any utilisation"
        )
    if cost.months_to_pay is not None:
        parts.append(f"the rent of {cost.months_to_pay:.0f} months buys it")
    monthly = ", ".join(f"{way} {usd:,.0f}" for way, usd in cost.monthly().items())
    if monthly:
        parts.append(f"$ a month: {monthly} (burst: half owned, half rented for 6 hours a day)")
    money = "; ".join(parts) or "no price known"
    watts = (
        f"GPUs {power.gpu_w / 1000:.1f} kW ({power.gpu_sustained_w / 1000:.1f} sustained), server "
        f"{power.server_w / 1000:.1f} kW ({power.server_sustained_w / 1000:.1f}), facility "
        f"{power.facility_w / 1000:.1f} kW; {power.amperes:.0f} A at {power.volts} V, {power.rack_units} U, cooled "
        f"by {power.cooling}: {power.hint}"
    )
    return f"[bold]Price[/] {best.paid.name}: {money}. Prices: {'; '.join(cost.dates)}.\n[bold]Power[/] {watts}."


def _show_excluded(plan: Plan, console: Console) -> None:
    """Every reason once, with the TP degrees, engines and formats it applies to."""
    reasons: dict[str, list[Excluded]] = {}
    for each in nearest(plan.excluded):
        reasons.setdefault(f"{each.found} {each.fix}", []).append(each)
    if not reasons:
        return
    console.print("\n[bold]Left out[/]")
    for reason, cases in list(reasons.items())[:_EXCLUDED_SHOWN]:
        degrees, engines, formats = (
            ",".join(dict.fromkeys(str(getattr(case, name)) for case in cases))
            for name in ("tp", "engine", "weight_format")
        )
        console.print(f"  TP={degrees} {engines} {formats}: {reason}", highlight=False)
    if len(reasons) > _EXCLUDED_SHOWN:
        console.print(f"  {len(reasons) - _EXCLUDED_SHOWN} more reasons with --json")
