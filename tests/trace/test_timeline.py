"""Slices, waiting and files made of marks in virtual time; and clocks that differ."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.marks import PLACE, StepTraces
from phalanx.engine.whereabouts import HEAD
from phalanx.errors import ConfigError
from phalanx.runtime.tracer import ahead_by_pings
from phalanx.trace import perfetto
from phalanx.trace.summary import EXCHANGE, WAIT, summarise
from phalanx.trace.timeline import effects_before_causes, steps_of, unsure_clocks
from tests.trace.made import LAYERS, make_traces


def test_who_waited_for_whom_and_for_how_long() -> None:
    steps = steps_of(make_traces([10, 13, 10], exchange_us=2))
    found = summarise(steps)
    assert {call.last for step in steps for call in step.calls} == {1}
    assert [steps[0].calls[0].waited(rank) for rank in range(3)] == [3000, 0, 3000]
    assert all(call.exchanged(rank) == 2000 for call in steps[0].calls for rank in range(3))
    assert found.of(WAIT) == pytest.approx(2 * LAYERS * 2e-3)
    assert found.of(EXCHANGE) == pytest.approx(2 * LAYERS * 2e-3)
    assert found.waits == {1: pytest.approx(2 * LAYERS * 6e-3)}
    assert found.of("attention") == found.of("FFN") == pytest.approx(LAYERS * 11e-3)
    assert [layer.total for layer in found.layers] == pytest.approx([30e-3] * LAYERS)
    assert found.period == pytest.approx(2 * LAYERS * 15e-3 + 2e-3)


def test_shares_are_of_all_steps_and_not_of_the_time_without_requests() -> None:
    """One step takes ten times as long, and before another one the engine had nothing to do for a second."""
    traces = make_traces([10, 10], exchange_us=2)
    late = msgspec.convert(msgspec.to_builtins(traces), type(traces))
    even = summarise(steps_of(traces))
    late.hosts[2].running = late.hosts[2].waiting = 0
    _shift(late, 3, 10**9)
    assert summarise(steps_of(late)).period == pytest.approx(even.period, rel=0.02)
    late.hosts[2].waiting = 1
    assert summarise(steps_of(late)).period == pytest.approx(even.period + 1e3 / 5, rel=0.02)
    assert {step.pause for step in steps_of(late)} == {None, 1000, 10**9 + 1000}
    _shift(late, 4, 10 * 10**6, stretched=True)
    found = summarise(steps_of(late))
    assert sum(part.mean for part in found.parts) == pytest.approx(found.period, rel=0.02)


def _shift(traces: StepTraces, first: int, ns: int, stretched: bool = False) -> None:
    """All from a step on comes later; or this step ends later, its head being what takes so long."""
    for host in traces.hosts[first:]:
        is_it = stretched and host is traces.hosts[first]
        for name in ("collected", "applied") if is_it else ("begun", "scheduled", "launched", "collected", "applied"):
            setattr(host, name, getattr(host, name) + ns)
    for rank in traces.ranks:
        for step in rank.steps[first:]:
            is_it = stretched and step is rank.steps[first]
            step.begun, step.ended = step.begun + ns * (not is_it), step.ended + ns
            head = [number for number, mark in enumerate(step.marks) if mark.value == HEAD and mark.what == PLACE].pop()
            step.marks = [
                msgspec.structs.replace(mark, time=mark.time + ns * (not is_it or number > head))
                for number, mark in enumerate(step.marks)
            ]


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20),
)
def test_another_clock_is_known_to_half_of_the_shortest_ping(ahead: int, delays: list[tuple[int, int]]) -> None:
    pings, now = [], 10**15
    for there, back in delays:
        pings.append((now, now + there + ahead, now + there + back))
        now += there + back + 1000
    found, uncertain = ahead_by_pings(pings)
    assert abs(found - ahead) <= uncertain + 1
    assert uncertain == min(map(sum, delays)) // 2


def test_clocks_apart_are_brought_together_to_20_us_and_clocks_left_apart_are_seen() -> None:
    """A machine whose clock is 3.7 s ahead, asked over a link of 30 us by pings late one way or the other."""
    traces = make_traces([10, 13])
    ahead = 3_700_000_000
    delays = [(900_000, 14_000), (17_000, 400_000), (12_000, 18_000), (15_000, 2_000_000)]
    pings = [(10**9, 10**9 + there + ahead, 10**9 + there + back) for there, back in delays]
    apart = msgspec.convert(msgspec.to_builtins(traces), type(traces))
    for step in apart.ranks[1].steps:
        step.begun, step.ended = step.begun + ahead, step.ended + ahead
        step.marks = [msgspec.structs.replace(mark, time=mark.time + ahead) for mark in step.marks]
    assert list(effects_before_causes(steps_of(apart)))
    found, uncertain = ahead_by_pings(pings)
    assert abs(found - ahead) <= uncertain <= 20_000
    apart.ranks[1] = msgspec.structs.replace(apart.ranks[1], ahead=found)
    for true, told in zip(steps_of(traces), steps_of(apart), strict=True):
        assert abs(true.ranks[1].begun - told.ranks[1].begun) <= 20_000
    assert not list(effects_before_causes(steps_of(traces)))


@pytest.mark.parametrize(("uncertain", "said"), [(20_000, False), (21_000, True)])
def test_clocks_that_could_not_be_brought_so_near_are_said(uncertain: int, said: bool) -> None:
    traces = make_traces([10, 13])
    traces.ranks[1] = msgspec.structs.replace(traces.ranks[1], uncertain=uncertain)
    assert ("rank 1 to 21 us" in unsure_clocks(traces)) == said == bool(unsure_clocks(traces))


def test_slices_nest_and_arrows_have_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    traces = make_traces([10, 13])
    perfetto.save(path, traces)
    assert perfetto.read(path) == traces
    events = json.loads(msgspec.json.encode(perfetto.to_chrome(traces)))["traceEvents"]
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_until: list[float] = []
        for begun, ended in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begun + 1e-6:
                open_until.pop()
            assert not open_until or ended <= open_until[-1] + 1e-6
            open_until.append(ended)
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append((event["ph"], event["pid"]))
    assert len(ends) == 6 * 2 * LAYERS
    assert all(each == [("s", 1), ("f", 0)] for each in ends.values())
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"requests", "free KV blocks"}


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="no trace of Phalanx"):
        perfetto.read(path)
