"""Traces of real traffic in the forms they are published in."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.plan.traffic import read_trace
from phalanx.spec.workload import WorkloadError


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
