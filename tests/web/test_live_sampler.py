"""One sample a second of what the engine does: rates, percentiles, means over time, ranks, and lives of engines."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.speculation import SpeculationTotals
from phalanx.engine.step_plan import Totals
from phalanx.plan.predict import Interval
from phalanx.server import recent as recent_module
from phalanx.server.messages import Books, NewToken, Started, Stepped
from phalanx.server.metrics import Metrics
from phalanx.web.expect import Expected, Load
from phalanx.web.sampler import KEPT, WINDOW, LoadSampler, RankSample, Sample, percentiles_ms

STARTED = Started(vocab=100, max_model_len=64, max_num_seqs=4, num_blocks=8, block_size=16, stop_tokens=[])


class Place:
    """A sampler beside an engine that does what the test says, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(recent_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.metrics = Metrics("tiny", vllm_names=False)
        self.ranks: dict[int, tuple[Totals, float]] = {}
        self.supervisor: Any = SimpleNamespace(state="ready", death=None, client=self.client())
        self.sampler = LoadSampler(self.supervisor, self.metrics.recent)
        self.metrics.engine_started(STARTED.num_blocks)

    def client(self) -> SimpleNamespace:
        return SimpleNamespace(started=STARTED, totals=lambda: dict(self.ranks))

    def step(self, tokens: int = 1, **books: Any) -> None:
        counts = {"running": 1, "waiting": 0, "free_blocks": 8, "preemptions": 0, "prefix_queries": 0, "prefix_hits": 0}
        new = [NewToken(1, 5, None, 0, 0.0)] * tokens
        self.metrics.stepped(Stepped(new, Books(**({"totals": Totals()} | counts | books))))

    def sample(self, after_s: float = 1.0) -> Sample:
        self.now += after_s
        return self.sampler.sample()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


def test_rates_are_by_the_seconds_that_passed(place: Place) -> None:
    place.step(6, prefix_queries=40, prefix_hits=10, totals=Totals(steps=2, prompt_tokens=40))
    place.step(4, prefix_queries=60, prefix_hits=15, totals=Totals(steps=4, prompt_tokens=50))
    sample = place.sample(2.0)
    assert (sample.inputs, sample.cached, sample.outputs, sample.steps) == (30, 7.5, 5, 2)
    assert place.sample().outputs == 0


def test_running_and_waiting_are_means_over_time_and_not_what_is_there_at_the_end(place: Place) -> None:
    place.step(running=4, waiting=2, free_blocks=4)
    place.now += 0.25
    place.step(running=0, waiting=0, free_blocks=8)
    sample = place.sample(0.75)
    assert (sample.running, sample.waiting, sample.held) == (1.0, 0.5, 0.125)


def test_blocks_kept_for_their_prefix_are_told_beside_those_held(place: Place) -> None:
    place.step(free_blocks=6, idle_blocks=2)
    sample = place.sample()
    assert (sample.held, sample.kept) == (0.25, 0.25)


@given(st.lists(st.floats(0.0001, 100), min_size=1, max_size=300))
def test_percentiles_are_exactly_the_values_that_so_many_do_not_exceed(values: list[float]) -> None:
    ordered = sorted(values)
    exact = [ordered[math.ceil(share * len(values)) - 1] for share in (0.5, 0.9, 0.99)]
    half = len(values) // 2
    found = percentiles_ms([array("d", values[:half]), array("d", values[half:])])
    assert found == [float(f"{value * 1e3:.4g}") for value in exact]


def test_percentiles_look_back_ten_samples_and_no_further(place: Place) -> None:
    place.metrics.first_token(5.0)
    place.metrics.next_token(0.5)
    assert place.sample().ttft == [5000, 5000, 5000]
    for _ in range(WINDOW - 1):
        place.metrics.first_token(1.0)
        sample = place.sample()
        assert sample.ttft is not None
        assert sample.ttft[2] == 5000
        assert sample.itl == [500, 500, 500]
        assert sample.itl_mean is None
    place.metrics.first_token(1.0)
    last = place.sample()
    assert (last.ttft, last.itl) == ([1000, 1000, 1000], None)


def test_the_share_of_hits_is_that_of_the_window_and_none_where_nothing_was_asked(place: Place) -> None:
    assert (place.sample().hits, place.sample().accepted) == (None, None)
    place.step(prefix_queries=100, prefix_hits=0)
    assert place.sample().hits == 0
    place.step(prefix_queries=200, prefix_hits=50, speculation=SpeculationTotals(2, 8, 6, [2, 2, 1, 1]))
    sample = place.sample()
    assert (sample.hits, sample.accepted) == (0.25, 0.75)


def test_an_hour_is_kept(place: Place) -> None:
    for _ in range(KEPT + 5):
        place.sample()
    assert len(place.sampler.samples) == KEPT == 3600
    assert place.sampler.taken == KEPT + 5


def test_a_new_engine_counts_from_zero_and_what_ran_on_the_old_one_does_not_run_on(place: Place) -> None:
    place.step(
        9, running=4, free_blocks=0, preemptions=3, prefix_queries=500, totals=Totals(steps=50, prompt_tokens=900)
    )
    assert place.sample().preemptions == 3
    place.supervisor.state, place.supervisor.death = "restarting", Exception("killed")
    place.sample()
    down = place.sample()
    assert (down.up, down.running, down.held, down.kept, down.ranks) == (False, 0, 0, 0, [])
    place.supervisor.client = place.client()
    assert place.sample().inputs == 0
    place.supervisor.state, place.supervisor.death = "ready", None
    place.metrics.engine_started(STARTED.num_blocks)
    assert place.sample().steps == 0
    place.step(2, preemptions=1, prefix_queries=30, totals=Totals(steps=1, prompt_tokens=30))
    after = place.sample()
    assert (after.up, after.inputs, after.outputs, after.preemptions, after.steps) == (True, 30, 2, 1, 1)


def test_parts_are_milliseconds_of_a_finished_step_by_rank(place: Place) -> None:
    def spent(finished: int, device_s: float, all_reduce_s: float, schedule_s: float = 0.0) -> Totals:
        return Totals(
            steps=finished,
            schedule_s=schedule_s,
            launch_s=0.0,
            device_s=device_s,
            all_reduce_s=all_reduce_s,
            sample_s=0.0,
            finished=finished,
        )

    place.ranks = {0: (spent(10, 0.4, 0.1, 0.02), 50.0), 1: (spent(10, 0.1, 0.4), 50.1)}
    place.sample()
    place.ranks = {0: (spent(14, 0.6, 0.12, 0.06), 51.0), 1: (spent(15, 0.2, 0.6), 51.1)}
    first, second = place.sample().ranks
    assert first == RankSample([10, 0, 50, 5, 0], 0.26)
    assert second == RankSample([0, 0, 20, 40, 0], 0.3)


def test_a_rank_that_finished_no_step_or_said_nothing_has_no_parts(place: Place) -> None:
    place.ranks = {
        0: (Totals(steps=5, device_s=1.0, finished=5), 50.0),
        1: (Totals(steps=5, device_s=1.0, finished=5), 50.0),
    }
    place.sample()
    place.ranks[0] = (Totals(steps=6, device_s=1.0, finished=5), 51.0)
    assert place.sample().ranks == [None, None]


class Always:
    kind, source = "plan", "a test"

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self.learned: list[tuple[Load, float]] = []

    def learn(self, load: Load, gap_s: float) -> None:
        self.learned.append((load, gap_s))

    def of(self, load: Load) -> Expected | None:
        return Expected(Interval(self.gap_s, self.gap_s / 2, self.gap_s * 2), 2 * self.gap_s)


def test_expected_output_is_that_of_the_same_steps_at_the_expected_pace_while_there_was_work(place: Place) -> None:
    place.sampler.expectation = always = Always(0.05)
    place.step(0, running=2, totals=Totals(steps=0))
    place.now += 0.5
    place.metrics.next_token(0.1)
    place.step(10, running=0, totals=Totals(steps=5, decodes=10, context=1000))
    sample = place.sample(0.5)
    assert always.learned == [(Load(2, 200, input_tokens=1, output_tokens=10), 0.1)]
    assert sample.expected_itl == [50, 25, 100]
    assert sample.expected_out == 10 / 5 / 0.1 * 0.5
    assert sample.itl_mean == 100


def test_nothing_is_expected_of_no_steps(place: Place) -> None:
    place.sampler.expectation = Always(0.05)
    sample = place.sample()
    assert (sample.expected_itl, sample.expected_out) == (None, None)
