"""Findings as a person reads them, on narrow and wide screens, and as programs do."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from phalanx.doctor.checks import judge
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding
from phalanx.doctor.report import TOGETHER, Verdict, about, has_errors, show, to_dict
from tests.doctor.build_machines import hgx, mixed_cards, no_fabric_manager, spark, throttled


def verdict(facts: Facts) -> Verdict:
    return Verdict(facts.system.hostname, about(facts), tuple(judge(facts)))


def printed(width: int, *verdicts: Verdict, everything: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    show(verdicts, console, everything)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_lost_or_runs_over_the_edge(width: int) -> None:
    for facts in (no_fabric_manager(), mixed_cards(), throttled()):
        text = printed(width, verdict(facts))
        words = set(text.split())
        for finding in verdict(facts).findings:
            told = f"{finding.title} {finding.found} {finding.why} {finding.fix}" if finding.level != "ok" else ""
            missing = [word for word in told.split() if word not in words and word + ":" not in words]
            assert not missing, (finding.code, missing)
        assert all(len(line) <= width for line in text.splitlines()[:-1])


def test_the_worst_comes_first_and_the_sum_last() -> None:
    lines = printed(80, verdict(no_fabric_manager())).splitlines()
    marks = [line.split()[1] for line in lines if line.startswith((" x ", " ! ", " - ", " + "))]
    assert marks == ["error", "error", "error", "note"]
    assert lines[-1] == "Not fit to serve: 3 errors, 0 warnings, 1 note, 21 checks fine."


def test_what_is_fine_is_shown_when_asked_for() -> None:
    assert "Peer access" not in printed(80, verdict(hgx()))
    assert "Peer access: allowed between all 28 pairs" in printed(80, verdict(hgx()), everything=True)


@pytest.mark.parametrize(
    ("facts", "start"),
    [(hgx(), "Healthy: 0 errors"), (throttled(), "Serves, but not as well as it could: 0 errors, 3 warnings")],
)
def test_the_summary_has_three_tones(facts: Facts, start: str) -> None:
    assert printed(140, verdict(facts)).splitlines()[-1].startswith(start)


def test_several_machines_are_told_one_by_one() -> None:
    all_of_them = Verdict(TOGETHER, "All of them together", ())
    text = printed(80, verdict(spark(1)), verdict(spark(2)), all_of_them)
    assert text.count("NVIDIA DGX Spark: 1 x NVIDIA GB10") == 2
    assert "18 checks fine, nothing else to say" in text
    assert text.splitlines()[-1].startswith("Healthy (2 machines)")


def test_only_errors_make_it_fail() -> None:
    assert has_errors([verdict(no_fabric_manager())])
    assert not has_errors([verdict(throttled())])


def test_the_record_for_programs() -> None:
    record = json.loads(json.dumps(to_dict([verdict(no_fabric_manager())], [no_fabric_manager()])))
    assert record["healthy"] is False
    assert record["machines"][0]["counts"] == {"error": 3, "warning": 0, "note": 1, "ok": 21}
    assert set(record["machines"][0]["findings"][0]) == set(Finding.__struct_fields__)
    assert record["facts"][0]["system"]["hostname"] == "hgx-4"


def test_markup_in_a_finding_is_text() -> None:
    strange = Verdict("box", "box", (Finding("error", "x", "[red]title[/red]", "[/] found", "why [bold]", "fix"),))
    assert "[red]title[/red]" in printed(80, strange)
