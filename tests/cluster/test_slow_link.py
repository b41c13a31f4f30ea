"""Two machines, one model, and a link that falls to half of its speed: that is found, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from phalanx.doctor.live import Picture, findings_of, picture_of
from phalanx.engine.marks import StepTraces
from tests.cluster.hosts import FAR, HEAD, Hosts, two_namespaces, why_not
from tests.cluster.traced_ranks import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[2]
WHOLE, HALF = 100, 50
"""Mbit/s: far less than two processes on one machine can exchange, so that what else runs there hardly matters."""
_TRACES = 5


class Ranks:
    """Two of them, one on each host."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def trace(self, asleep: str = "") -> StepTraces:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{asleep}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        return msgspec.json.decode(line, type=StepTraces)


@contextmanager
def ranks_on(hosts: Hosts, folder: Path) -> Iterator[Ranks]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    module = [sys.executable, "-m", "tests.cluster.traced_ranks", str(folder), hosts.far.name, HEAD, FAR]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts.near.name, *module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=hosts.near.variables,
        )  # fmt: skip
    with process:
        yield Ranks(process, log)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_namespaces() as made:
        try:
            made.shape(WHOLE)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network cards cannot be shaped: {error}")
        yield made


def by_the_start(traces: StepTraces) -> Picture:
    """As if the virtual cards did not tell that they are good for 10 Gbit/s, which the cable never was."""
    assert [rank.pace.card for rank in traces.ranks if rank.pace] == [10e9 / 8] * 2
    ranks = [replace(rank, pace=replace(rank.pace, card=0.0)) for rank in traces.ranks if rank.pace]
    return picture_of(replace(traces, ranks=ranks))


def codes(picture: Picture) -> list[str]:
    return [finding.code for finding in findings_of(picture)]


def found_alone(code: str, trace: Callable[[], StepTraces]) -> Picture:
    """A trace in which just this is found. Where others take a rank's core away, that is found, and rightly: then the
    next one counts.
    """
    found: list[list[str]] = []
    while [code] not in found:
        assert len(found) < _TRACES, found
        seen = by_the_start(trace())
        found.append(codes(seen))
    return seen


def pace_of(traces: StepTraces) -> float:
    """What the ranks took for the cable's Mbit/s when they met, or where that is less, what it does in a trace."""
    link = by_the_start(traces).link
    assert link is not None
    return 8e-6 * min(link.rate, *(rank.pace.bandwidth for rank in traces.ranks if rank.pace))


@contextmanager
def ranks_that_met(hosts: Hosts, folder: Path) -> Iterator[tuple[Ranks, StepTraces]]:
    """With their first trace. Started anew where others had the cores just then: it is half of what they saw that is
    to be found.
    """
    for last in (False, False, False, True):
        with ranks_on(hosts, folder) as ranks:
            at_first = ranks.trace()
            if last or pace_of(at_first) > WHOLE:
                yield ranks, at_first
                return


def test_a_link_at_half_speed_is_named_and_no_other_fault_is_taken_for_one(hosts: Hosts, tmp_path: Path) -> None:
    with ranks_that_met(hosts, tmp_path) as (ranks, at_first):
        found_alone("slow_rank", lambda: ranks.trace("rank"))
        slow_host = by_the_start(ranks.trace("host"))
        hosts.shape(HALF)
        half = found_alone("slow_link", ranks.trace)
    whole = by_the_start(at_first)
    assert "slow_link" not in codes(whole)
    assert {"host_gaps"} == {"host_gaps", "slow_link"} & set(codes(slow_host))
    (finding,) = findings_of(half)
    assert finding.title == f"The link between host {HEAD} and host {FAR} is slow"
    assert "when the ranks joined" in finding.found
    assert whole.link is not None
    assert half.link is not None
    assert half.link.took / whole.link.took == pytest.approx(WHOLE / HALF, abs=0.4)
    assert half.link.rate * 8e-6 == pytest.approx(HALF, rel=0.2)

    by_cards = {finding.code: finding for finding in findings_of(picture_of(at_first))}
    assert "can be expected of its network cards" in by_cards["slow_link"].found
