"""A histogram tells what prometheus_client's own does, under each of its names."""

from __future__ import annotations

import prometheus_client
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from phalanx.server.histogram import Histogram

BOUNDS = (0.001, 0.5, 1, 2.5, 10)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20))))
@example([])
@example([0.5, 0.5000001, 10, 11])
@settings(deadline=None, max_examples=50)
def test_it_tells_what_the_library_would(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram(["a_seconds", "b:seconds"], "Some seconds.", "tiny", BOUNDS)
    ours.register(mine)
    for name in ("a_seconds", "b:seconds"):
        made = prometheus_client.Histogram(
            name, "Some seconds.", ["model_name", "engine"], buckets=BOUNDS, registry=theirs
        ).labels("tiny", "0")
        for value in values:
            made.observe(value)
    for value in values:
        mine.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
