"""What each lever bought: a table, a picture, and the options of `phalanx serve` that come of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.table import Table

from phalanx.plan.tuning import Rung, Setting, difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTERS = 140
"""So many fit below all bars."""


def table(title: str, rungs: Sequence[Rung]) -> Table:
    caption = f"Start: {_start(rungs[0].setting)}"
    found = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    found.add_column("lever")
    found.add_column("setting")
    for name in ("tok/s", "gain", "req/s", "TTFT ms", "TPOT ms", "hits"):
        found.add_column(name, justify="right")
    for place, rung in enumerate(rungs):
        before = rungs[max(place - 1, 0)]
        value = rung.value
        changed = "" if not place else difference(before.setting, rung.setting)
        gain = "" if not place else f"{rung.gain(before):.2f}x" if before.value.goodput else "from none"
        times = (
            ("-",) * 3
            if value.problem
            else (f"{value.ttft * 1e3:,.0f}", f"{value.tpot * 1e3:.1f}", f"{value.hits:.0%}")
        )
        found.add_row(
            rung.lever, changed, value.problem or f"{value.goodput:,.0f}", gain,
            "-" if value.problem else f"{value.rate:.2f}", *times,
        )  # fmt: skip
    return found


def _start(setting: Setting) -> str:
    caching = "prefix caching" if setting.prefix_caching else "no prefix caching"
    return (
        f"{setting.replicas} x TP={setting.tp}, {setting.weights}, {setting.max_num_seqs} sequences, "
        f"{setting.max_num_batched_tokens} tokens a step, {caching}"
    )


def save_plot(title: str, rungs: Sequence[Rung], path: Path) -> None:
    draw(title, rungs).savefig(path, dpi=150)


def draw(title: str, rungs: Sequence[Rung]) -> Figure:
    """A bar for the start, one for what each lever added, and one for what there is in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    before, names = 0.0, list[tuple[str, ...]]()
    for place, rung in enumerate(rungs):
        goodput = rung.value.goodput
        axes.bar(place, goodput - before, bottom=before, color="tab:blue" if not place else "tab:green")
        gain = f"\n{goodput / before:.2f}x" if before else ""
        axes.annotate(
            f"{goodput:,.0f}{gain}", (place, goodput), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
        changed = "start" if not place else difference(rungs[place - 1].setting, rung.setting)
        names.append((rung.lever, changed) if place else ("start",))
        before = goodput
    axes.bar(len(rungs), before, color="tab:blue")
    room = _LETTERS // (len(rungs) + 1)
    labels = ("\n".join(line for words in name for line in wrap(words, room)) for name in (*names, ("together",)))
    axes.set_xticks(range(len(rungs) + 1), list(labels), fontsize=7)
    axes.set_ylabel("output tokens/s within the SLO")
    axes.set_ylim(0, 1.15 * max(rung.value.goodput for rung in rungs) or 1)
    axes.set_title(title, fontsize=10)
    return figure


def config_toml(setting: Setting, model: str | None, checkpoint_format: str, longest: int, note: str) -> str:
    """For `phalanx serve --config`. What no option says stands in comments. Requests longer than those it was found for
    are not refused.
    """
    options: dict[str, object] = {
        **({} if model is None else {"model": model}),
        "tp": setting.tp,
        "max-num-seqs": setting.max_num_seqs,
        "max-num-batched-tokens": setting.max_num_batched_tokens,
        "prefix-caching": setting.prefix_caching,
        "kv-cache-dtype": "fp8" if setting.kv == "fp8" else "auto",
        "speculate": setting.speculate,
    }
    lines = [f"# {note}", f"# Requests had at most {longest:,} tokens; longer ones take longer and more room."]
    if setting.replicas > 1:
        lines.append(f"# Run {setting.replicas} of these, each on {setting.tp} GPUs of its own.")
    if setting.weights != checkpoint_format:
        lines.append(f"# Weights in {setting.weights}: name a checkpoint that has them (phalanx quantize makes some).")
    return "\n".join([*lines, *(f"{name} = {json.dumps(value)}" for name, value in options.items())]) + "\n"
