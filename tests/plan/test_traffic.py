"""Traces of real traffic in the forms they are published in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.rules import Rules
from phalanx.plan.search import per_replica
from phalanx.plan.simulate import simulate
from phalanx.plan.traffic import read_sessions, read_trace
from phalanx.spec.workload import Workload, WorkloadError


def write(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,input_tokens,output_tokens\n10.5,100,20\n10,50,5\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:10.5000000,100,20\n"
        "2024-05-10 00:00:10.0000000,50,5\n",
        '{"timestamp": 10500, "input_length": 100, "output_length": 20, "hash_ids": [1]}\n'
        '{"timestamp": 10000, "input_length": 50, "output_length": 5, "hash_ids": [2]}\n',
    ],
    ids=["csv", "dates", "json-lines"],
)
def test_arrivals_count_from_the_first_in_order(text: str, tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, text)) == ((0.0, 50, 5), (0.5, 100, 20))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("arrival_s,input_tokens\n1,2\n", "Request 1"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n1,x,3\n", "Request 2"),
        ("arrival_s,input_tokens,output_tokens\n1,0,3\n", "0 input"),
        ("arrival_s,input_tokens,output_tokens\nsoon,1,3\n", "soon"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("", "no requests"),
        ('{"timestamp": 1,\n', "Line 1"),
    ],
)
def test_a_broken_trace_is_refused_by_its_line(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as refused:
        read_trace(write(tmp_path, text))
    assert refused.value.code == "bad_trace"
    assert named in refused.value.found


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv")


def test_turns_of_a_session_find_what_was_said_before(tmp_path: Path) -> None:
    """Three turns 100 s apart: the second and the third begin with all that came before, in whole blocks of 16."""
    path = tmp_path / "turns.csv"
    head = "arrival_s,input_tokens,output_tokens,session\n"
    path.write_text(head + "0,160,32,a\n100,320,32,a\n200,480,32,a\n50,160,32,b\n")
    trace, sessions = read_sessions(path)
    assert [arrival for arrival, *_ in trace] == [0, 50, 100, 200]
    assert sessions == (0, 1, 0, 0)
    load = Workload(trace=trace, sessions=sessions)
    found = simulate(load, Rules("mixed"), 10_000, lambda step: 0.01)
    assert 2 * 160 < found.cached_tokens <= 192 + 352
    assert simulate(replace(load, sessions=()), Rules("mixed"), 10_000, lambda step: 0.01).cached_tokens == 0
    tight = simulate(load, Rules("mixed"), 528, lambda step: 0.01)
    assert tight.cached_tokens <= found.cached_tokens
    assert per_replica(load, 2).sessions == (0, 0, 0), "a session stays with its replica"
    assert read_trace(path) == trace
