"""Tuning for real, on a tiny model; and what it writes."""

from __future__ import annotations

import inspect
import time
import tomllib
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from phalanx.bench import tuning
from phalanx.bench.tuning import Bench, LinearPrice, drive, tune_for_real
from phalanx.bench.waterfall import config_toml, draw, save_plot, table
from phalanx.cli.serve import serve
from phalanx.plan.goodput import SeenRun, Traffic
from phalanx.plan.predict import Interval
from phalanx.plan.slo import Slo
from phalanx.plan.tuning import Rung, Setting, Value
from phalanx.runtime.config import EngineConfig
from phalanx.spec.workload import Workload

START = Setting(max_num_seqs=2, max_num_batched_tokens=64)
BETTER = Setting(max_num_seqs=8, max_num_batched_tokens=256, prefix_caching=True)


class Ticks:
    """A clock that goes on by 20 ms whenever somebody looks at it."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.02
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _check_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are so slow that not one run would end in time: all is over when it should be."""
    ticks = Ticks()
    monkeypatch.setattr(tuning, "time", ticks)
    bench.deadline = 5.0
    first, *_ = tune_for_real(bench, START, [("sequences", BETTER)])
    assert ticks.now < 7
    assert first.value.rate < 10
    cut = drive(bench.engine(BETTER), [(8, 400)] * 20, [0.0] * 20, 0, seed=3, until=ticks.now + 0.5)
    assert len(cut.requests_ttft) > 0
    assert not bench.engine(BETTER).has_work


def test_the_start_and_the_best_are_measured(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(tiny_llama), max_num_seqs=8, max_num_batched_tokens=256)
    traffic = Traffic(Workload(64, 8, shared_prefix=48), Slo.parse("ttft:600000"))
    told: list[str] = []
    bench = Bench(config, traffic, 0.1, time.monotonic() + 600, told.append)
    try:
        price, kv_tokens = bench.price(BETTER)
        assert isinstance(price, LinearPrice)
        assert price.step > 0
        assert kv_tokens >= 8 * 72
        rungs = tune_for_real(bench, START, [("sequences", BETTER)])
        seen = bench._at(bench.engine(BETTER), 1000.0, until=time.monotonic() + 600)
        _check_budget(bench, monkeypatch)
    finally:
        bench.close()
    assert rungs[0].setting == START
    assert all(rung.value.goodput > 0 and rung.value.ttft > 0 for rung in rungs)
    assert any("requests/s" in words for words in told)
    assert 0.5 < seen.cached_share <= 0.75
    assert len(seen.requests_ttft) == 100


class KnownBench(Bench):
    """Engines that make so many tokens a second, less in short runs, whose beginnings and ends count for more."""

    def __init__(self, speeds: dict[Setting, float]) -> None:
        self.traffic, self.seconds = Traffic(Workload(64, 16), Slo.parse("ttft:600")), 3.0
        self.deadline, self.tell = time.monotonic() + 600, lambda words: None
        self.speeds, self.runs = speeds, list[tuple[Setting, int]]()

    def engine(self, setting: Setting) -> Setting:  # type: ignore[override]
        return setting

    def _saturated(self, engine: Setting, requests: int, until: float) -> float:  # type: ignore[override]
        self.runs.append((engine, requests))
        return self.speeds[engine] * requests / (requests + 4)

    def _at(self, engine: Setting, rate: float, until: float) -> SeenRun:  # type: ignore[override]
        ttft = Interval.around(0.1, 0.0)
        return SeenRun(ttft, ttft, [0.1], [0.1], Interval.around(rate, 0.0), 0.0)


GUESSING = replace(BETTER, speculate="ngram")


@pytest.mark.parametrize(
    ("better", "guessing", "gains", "chosen"),
    [
        (100.0, 100.5, [1.0, 1.0], START),
        (150.0, 150.5, [1.5, 1.0], BETTER),
        (150.0, 180.0, [1.5, 1.2], GUESSING),
        (100.5, 180.0, [1.0, 1.8], GUESSING),
        (90.0, 80.0, [1.0, 1.0], START),
    ],
)
def test_each_lever_has_what_it_bought_and_nothing_of_the_others(
    better: float, guessing: float, gains: list[float], chosen: Setting
) -> None:
    """Whoever is held against each other ran the same requests; what brings nothing is left where it was."""
    bench = KnownBench({START: 100.0, BETTER: better, GUESSING: guessing})
    rungs = tune_for_real(bench, START, [("sequences", BETTER), ("speculation", GUESSING)])
    assert [rung.lever for rung in rungs] == ["start", "sequences", "speculation"]
    assert [after.gain(before) for before, after in pairwise(rungs)] == pytest.approx(gains)
    assert rungs[-1].setting == chosen
    assert bench.runs[-1][0] == START


def test_options_are_those_of_serve_and_the_picture_is_drawn(tmp_path: Path) -> None:
    setting = Setting(tp=2, replicas=4, weights="fp8", kv="fp8", prefix_caching=True, max_num_seqs=512)
    text = config_toml(setting, "Llama-3.3-70B", "bf16", 4096, "made for a test")
    options = tomllib.loads(text)
    assert options.pop("model") == "Llama-3.3-70B"
    assert {name.replace("-", "_") for name in options} <= set(inspect.signature(serve).parameters)
    assert options["max-num-seqs"] == 512
    assert "max-model-len" not in options
    assert "at most 4,096 tokens" in text
    assert options["kv-cache-dtype"] == "fp8"
    assert "Run 4 of these" in text
    assert "Weights in fp8" in text
    assert "model" not in tomllib.loads(config_toml(setting, None, "fp8", 4096, ""))
    rungs = [Rung("start", START, Value(0.0, problem="no rate meets the SLO")), Rung("all", setting, Value(200.0, 2.0))]
    assert table("title", rungs).row_count == 2
    save_plot("title", rungs, tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_there_is_room_above_a_lever_that_brought_nothing() -> None:
    """Its bar has no height, and its number stands above it, below the title."""
    rungs = [Rung("start", START, Value(50.0)), Rung("all", BETTER, Value(54.0)), Rung("more", BETTER, Value(54.0))]
    (axes,) = draw("title", rungs).axes
    assert axes.get_ylim() == pytest.approx((0, 1.15 * 54))


def test_names_of_many_levers_do_not_run_into_each_other() -> None:
    names = ["start", "tokens a step", "sequences at once", "prefix caching", "weights", "KV cache", "TP x replicas"]
    changes = [{}, {}, {"max_num_seqs": 1024}, {"prefix_caching": True}, {"weights": "fp8"}, {"kv": "fp8"}]
    settings = list(accumulate([*changes, {"tp": 2, "replicas": 4}], lambda a, b: replace(a, **b), initial=START))[1:]
    rungs = [Rung(name, setting, Value(50.0)) for name, setting in zip(names, settings, strict=True)]
    figure = draw(
        "title", [*rungs, Rung(names[1], settings[-1], Value(50.0)), Rung(names[2], settings[-1], Value(50.0))]
    )
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
