"""What the lab found, as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from phalanx.bench.lab.experiment import Lab
from phalanx.bench.lab.point import LabPoint
from phalanx.bench.lab.verdict import verdicts

_CLOCKS_AGREE = 0.03

_ROWS: tuple[tuple[str, Callable[[LabPoint], str]], ...] = (
    ("TTFT ms, whole batch", lambda p: _beside(p.ttft_ms, p.planned_ttft_ms, p.least_ttft_ms)),
    ("TTFT ms, one prompt", lambda p: f"{p.ttft_alone_ms:,.1f}"),
    ("TPOT ms", lambda p: _beside(p.tpot_ms, p.planned_tpot_ms, p.least_tpot_ms)),
    ("in steps, by their clocks", lambda p: f"{p.clocks_ms:,.2f}"),
    ("between steps", lambda p: f"{p.between_ms:,.2f} ({p.between_ms / p.tpot_ms:.1%})"),
    ("decode tokens/s", lambda p: f"{p.decode_tok_s:,.1f}"),
    ("tokens/s a replica", lambda p: f"{p.tok_s:,.1f}"),
    ("tokens/s a rank", lambda p: f"{p.tok_s_per_gpu:,.1f}"),
    ("efficiency", lambda p: f"{p.efficiency:.0%}"),
    ("collectives, decode", lambda p: _share(p.decode_collectives, p.planned_collectives)),
    ("collectives, prompts", lambda p: f"{p.prompt_collectives:.1%}"),
    ("of that overlapped", lambda p: f"{p.overlap:.0%}"),
    ("GB/s (of measured)", lambda p: f"{p.achieved_gb_s:,.1f} ({p.of_bandwidth:.0%})"),
    ("GFLOP/s (of measured)", lambda p: f"{p.achieved_gflop_s:,.0f} ({p.of_flops:.0%})"),
    ("USD a million tokens", lambda p: "-" if p.usd_per_million is None else f"{p.usd_per_million:.2f}"),
    ("KV room, tokens", lambda p: f"{p.kv_tokens:,}"),
    ("longest context", lambda p: f"{p.longest_context:,}"),
    ("bottleneck", lambda p: p.bottleneck),
)


def _beside(measured: float, planned: float | None, least: float) -> str:
    """The plan's figure, or, where it has none of this machine, the least that its limits allow."""
    return f"{measured:,.2f} (≥ {least:,.2f})" if planned is None else f"{measured:,.2f} (plan {planned:,.2f})"


def _share(measured: float, planned: float | None) -> str:
    return f"{measured:.1%}" if planned is None else f"{measured:.1%} (plan {planned:.1%})"


def heading(lab: Lab) -> str:
    weights = ", random weights" if lab.random_weights else ""
    return f"{lab.model} on {lab.device}, {lab.case}{weights}"


def table(lab: Lab) -> Table:
    made = Table(title=heading(lab), caption=_source(lab), box=None, padding=(0, 1, 0, 0))
    made.add_column("")
    for point in lab.points:
        made.add_column(f"TP={point.tp}", justify="right", no_wrap=True)
    for name, cell in _ROWS:
        made.add_row(name, *map(cell, lab.points))
    return made


def _source(lab: Lab) -> str:
    planned, least = "plan: the planner's model", "≥: the least that this machine's memory and products allow"
    plan = planned if lab.points[0].planned_tpot_ms else least
    cores = "" if lab.on_gpus else " Ranks share the cores."
    return f"Collectives {lab.fabric}; {plan}.{cores}"


def remarks(lab: Lab) -> list[str]:
    """What a reader should know before believing the figures."""
    apart = [p for p in lab.points if abs(p.clocks_ms / p.tpot_ms - 1) > _CLOCKS_AGREE]
    beyond = [p for p in lab.points if max(p.of_bandwidth, p.of_flops, p.least_tpot_ms / p.tpot_ms) > 1]
    return [
        f"TP={p.tp}: a step takes {p.tpot_ms:.2f} ms by the wall and {p.clocks_ms:.2f} by its own clocks; the rest "
        "lies between steps."
        for p in apart
    ] + [
        f"TP={p.tp} is faster than this machine's limits, a copy and a large product: other work had the machine while "
        "they were measured. Limits and bottleneck are none then."
        for p in beyond
    ]


def markdown(lab: Lab, picture: str | None) -> str:
    titles = ["", *(f"TP={point.tp}" for point in lab.points)]
    rows = [titles, ["---", *["--:"] * len(lab.points)], *([name, *map(cell, lab.points)] for name, cell in _ROWS)]
    lines = [f"# {heading(lab)}", "", *(f"| {' | '.join(row)} |" for row in rows), "", _source(lab), ""]
    lines += [f"- **{use}**: {told}" for use, told in verdicts(lab.points, lab.on_gpus).items()]
    lines += [f"- {remark}" for remark in remarks(lab)]
    return "\n".join([*lines, "", *([f"![Scaling]({picture})", ""] if picture else [])])
