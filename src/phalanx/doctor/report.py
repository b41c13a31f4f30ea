"""Findings for a person and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding, Level

_MARKS: dict[Level, tuple[str, str]] = {
    "error": ("x error", "bold red"),
    "warning": ("! warn", "yellow"),
    "note": ("- note", "cyan"),
    "ok": ("+ ok", "green"),
}
_LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")
_TITLE_WIDTH = 26
_WIDE = 120
TOGETHER = "all machines"


@dataclass(frozen=True)
class Verdict:
    """What was found on one machine, or on all of them together, worst first."""

    machine: str
    about: str
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[Level, int]:
        found = Counter(finding.level for finding in self.findings)
        return {level: found[level] for level in _LEVELS}


def about(facts: Facts) -> str:
    """A machine in a line."""
    gpus = Counter(gpu.name for gpu in facts.gpus)
    cards = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or facts.system.cpu or "no GPU"
    driver = f", driver {facts.software.driver}" if facts.software.driver else ""
    return f"{facts.system.product or facts.system.hostname}: {cards}{driver}"


def has_errors(verdicts: Sequence[Verdict]) -> bool:
    return any(verdict.counts["error"] for verdict in verdicts)


def show(verdicts: Sequence[Verdict], console: Console, everything: bool = False) -> None:
    """A table for each machine, worst first, and one line that sums up."""
    for verdict in verdicts:
        shown = [finding for finding in verdict.findings if everything or finding.level != "ok"]
        console.print(Text(verdict.about, style="bold"))
        if shown:
            console.print(_table(shown, console.width))
        elif len(verdicts) > 1:
            console.print(Text(f"  {_fine(verdict)}", style="green"))
    console.print(_summary(verdicts), soft_wrap=True)


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Findings alone, of no machine."""
    if findings:
        console.print(_table(findings, console.width))


def _table(findings: Sequence[Finding], width: int) -> Table:
    """On a wide screen what was found stands beside what it means; on a narrow one all of it is below the title."""
    table = Table(box=SIMPLE_HEAD, show_header=width >= _WIDE, padding=(0, 1, 0, 0), expand=True)
    table.add_column("", no_wrap=True, width=7)
    if width >= _WIDE:
        table.add_column("check", width=_TITLE_WIDTH)
        table.add_column("found", ratio=2)
        table.add_column("why, and what to do", ratio=3)
    else:
        table.add_column("")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        if width >= _WIDE:
            table.add_row(Text(mark, style), Text(finding.title), Text(finding.found), _advice(finding))
        else:
            title = Text.assemble((finding.title, "bold"), ": ", finding.found)
            table.add_row(Text(mark, style), Group(title, _advice(finding)) if finding.why or finding.fix else title)
    return table


def _advice(finding: Finding) -> Text:
    text = Text(finding.why)
    if finding.fix:
        text.append("\n" if finding.why else "")
        text.append("-> " + finding.fix, style="green")
    return text


def _fine(verdict: Verdict) -> str:
    return f"{verdict.counts['ok']} checks fine, nothing else to say"


def _summary(verdicts: Sequence[Verdict]) -> Text:
    total: Counter[Level] = Counter()
    for verdict in verdicts:
        total.update(verdict.counts)
    words = ", ".join(
        f"{total[level]} {level if total[level] == 1 else level + 's'}" for level in ("error", "warning", "note")
    )
    if total["error"]:
        start, style = "Not fit to serve", "bold red"
    elif total["warning"]:
        start, style = "Serves, but not as well as it could", "bold yellow"
    else:
        start, style = "Healthy", "bold green"
    where = (
        f" ({len([verdict for verdict in verdicts if verdict.machine != TOGETHER])} machines)"
        if len(verdicts) > 1
        else ""
    )
    return Text(f"{start}{where}: {words}, {total['ok']} checks fine.", style=style)


def to_dict(verdicts: Sequence[Verdict], machines: Sequence[Facts]) -> dict[str, Any]:
    """The same for programs, with the facts it was judged by."""
    return {
        "healthy": not has_errors(verdicts),
        "machines": [
            {
                "machine": verdict.machine,
                "counts": verdict.counts,
                "findings": [msgspec.to_builtins(finding) for finding in verdict.findings],
            }
            for verdict in verdicts
        ],
        "facts": [msgspec.to_builtins(facts) for facts in machines],
    }
