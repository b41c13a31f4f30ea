"""The TP experiment: its figures are those of `bench offline` and of the steps' clocks, and its words follow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from phalanx.bench import timing
from phalanx.bench.ceilings import Ceilings
from phalanx.bench.lab import experiment
from phalanx.bench.lab.experiment import Experiment, Lab, checkpoint_of, run_lab
from phalanx.bench.lab.plot import draw
from phalanx.bench.lab.point import LabPoint
from phalanx.bench.lab.report import markdown, remarks
from phalanx.bench.lab.verdict import verdicts
from phalanx.bench.offline import least_work, summarise
from phalanx.bench.timing import FixedBatch, Timing
from phalanx.cli import app
from phalanx.engine import core
from phalanx.engine.core import Engine
from phalanx.errors import ConfigError, LayoutError
from phalanx.fabric import emulated
from phalanx.runtime import clock
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import held_weights
from phalanx.weights.checkpoint import Checkpoint

COLLECTIVE_MS = 0.5
CALLS = 2 * 4 + 2


def asked(model: Path, degrees: str, **options: object) -> Experiment:
    given: dict[str, object] = {"batch": 2, "inputs": 8, "outputs": 6, "iterations": 3, "warm_up": 1} | options
    return Experiment(EngineConfig(model=str(model), max_model_len=160), degrees, **given)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "measure_ceilings", lambda *how: Ceilings("a CPU", 1e10, 1e11))


class Ticks:
    """A clock that goes on by a microsecond whenever somebody looks at it, so that only those who wait take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    monotonic = perf_counter


def test_figures_are_those_of_bench_offline_and_of_the_clocks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits in ten collectives; nothing else takes time."""
    ticks, runs = Ticks(), list[Timing]()
    for module in (timing, core, clock, emulated):
        monkeypatch.setattr(module, "time", ticks)
    time_case = timing.time_case

    def timed(engine: Engine, *how: object, **options: object) -> Timing:
        runs.append(time_case(engine, *how, **options))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(experiment, "time_case", timed)
    lab = run_lab(asked(tiny_llama, "3", emulate=True, all_reduce_us=COLLECTIVE_MS * 1e3), lambda text: None)
    (point,), case = lab.points, FixedBatch.parse(lab.case)
    source, config, cpu = Checkpoint(tiny_llama), EngineConfig(tp=3), torch.device("cpu")
    work = least_work(source.spec, held_weights(config, source, cpu), config, cpu)
    said = summarise(case, runs[0], work, lab.ceilings, on_gpu=False)
    assert lab.case == "2x8x6"
    for name in ("tpot_ms", "clocks_ms", "decode_tok_s", "tok_s", "prefill_tok_s"):
        assert getattr(point, name) == pytest.approx(getattr(said, name), rel=1e-9), name
    assert point.of_bandwidth == pytest.approx(said.decode_share)
    assert point.ttft_ms == pytest.approx(runs[0].first * 1e3)
    assert point.clocks_ms == pytest.approx(point.tpot_ms, rel=0.03)
    assert point.clocks_ms + point.between_ms == pytest.approx(point.tpot_ms)
    assert point.tpot_ms == pytest.approx(CALLS * COLLECTIVE_MS, rel=0.03)
    assert point.ttft_ms == pytest.approx(CALLS * COLLECTIVE_MS, rel=0.03)
    assert point.ttft_alone_ms == pytest.approx(CALLS * COLLECTIVE_MS, rel=0.03)
    assert point.tok_s == pytest.approx(2e3 / (CALLS * COLLECTIVE_MS), rel=0.03)
    assert point.decode_collectives * point.tpot_ms == pytest.approx(CALLS * COLLECTIVE_MS)
    assert point.prompt_collectives * point.ttft_ms == pytest.approx(CALLS * COLLECTIVE_MS)
    assert point.bottleneck.startswith("collectives")
    assert remarks(lab) == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_command_measures_real_ranks_and_writes_what_it_found(tiny_llama: Path, tmp_path: Path) -> None:
    case = ["--batch", "2", "--isl", "8", "--osl", "48", "--usd-per-hour", "3.6"]
    result = CliRunner().invoke(app, ["lab", str(tiny_llama), "--tp", "1,2", *case, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "lab.json").read_text())
    one, two = record["points"]
    assert (one["tp"], one["decode_collectives"], one["efficiency"]) == (1, 0.0, 1.0)
    assert two["decode_collectives"] > 0
    assert two["prompt_collectives"] > 0
    assert two["efficiency"] == pytest.approx(two["tok_s"] / 2 / one["tok_s"])
    assert two["usd_per_million"] == pytest.approx(2 * 3.6 / 3600 / two["tok_s"] * 1e6)
    assert one["longest_context"] == min(one["kv_tokens"] // 2, 512)
    for use, told in record["verdicts"].items():
        assert f"- **{use}**: {told}" in (tmp_path / "lab.md").read_text()
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, ["lab", "--from", str(tmp_path / "lab.json"), "--output", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    for name in ("lab.md", "lab.png"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    (tmp_path / "other.json").write_text('{"points": 3}')
    refused = CliRunner().invoke(app, ["lab", "--from", str(tmp_path / "other.json")])
    assert refused.exit_code != 0
    assert "is no lab.json" in refused.output


def test_what_cannot_be_tried_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="--tp is"):
        run_lab(asked(tiny_llama, "2,x"), lambda text: None)
    with pytest.raises(LayoutError):
        run_lab(asked(tiny_llama, "1,64"), lambda text: None)
    with pytest.raises(ConfigError, match="--all-reduce-us"):
        run_lab(asked(tiny_llama, "2", emulate=True), lambda text: None)


def test_a_model_of_the_catalog_needs_no_weights() -> None:
    with checkpoint_of(EngineConfig(model="Llama-3.3-70B")) as config:
        assert config.load_format == "dummy"
        assert json.loads((Path(config.model or "") / "config.json").read_text())["num_hidden_layers"] == 80
    with checkpoint_of(EngineConfig(model="a/folder")) as config:
        assert (config.model, config.load_format) == ("a/folder", "auto")


def point(tp: int, tpot: float, context: int, waits: float = 0.1) -> LabPoint:
    tok_s = 32e3 / tpot
    return LabPoint(
        tp, 400, 30, tpot, tpot, 0, tok_s, tok_s, tok_s / tp, tok_s / tp / 3200, 1e4, waits, 0.1, 0, 1, 0.5, 1, 0.5,
        tp * 0.2, 32 * context, context, "memory 50%", None, None, None, None, None, 100, 5,
    )  # fmt: skip


def test_each_use_has_its_own_winner_and_the_number_that_decides() -> None:
    points = [point(1, 10, 1000), point(2, 6, 9000), point(4, 4, 30000), point(8, 3.9, 30000, waits=0.4)]
    told = verdicts(points, on_gpus=True)
    assert told["chat"].startswith("TP=4: 4.00 ms a token")
    assert told["chat"].endswith("TP=8 has 3.90, with 40% of a step in collectives.")
    assert told["long context"] == ("TP=4: 30,000 tokens for each request of this batch; TP=2 has room for 9,000.")
    assert told["offline"].startswith("TP=1: 3,200.0 tokens/s a GPU, 0.20 USD a million")
    assert "8 replicas of it make 25,600 tokens/s on 8 GPUs, one of TP=8 makes 8,205" in told["offline"]
    assert verdicts(points[::3], on_gpus=False)["offline"] == (
        "TP=8: 8,205.1 tokens/s; TP=1 makes 3,200.0, on the same cores."
    )


def test_figures_that_the_clocks_do_not_confirm_are_said(tiny_llama: Path) -> None:
    lab = run_lab(asked(tiny_llama, "2", emulate=True, all_reduce_us=1000.0), lambda text: None)
    tpot = lab.points[0].tpot_ms
    far = replace(lab, points=[replace(lab.points[0], clocks_ms=tpot * 0.9, between_ms=tpot * 0.1)])
    assert "lies between steps" in remarks(far)[0]
    assert remarks(far)[0] in markdown(far, "lab.png")


@pytest.mark.parametrize("figures", [{"of_flops": 1.2}, {"of_bandwidth": 1.1}, {"least_tpot_ms": 10.1}, {}])
def test_who_beats_the_limits_is_told_that_they_are_none(figures: dict[str, float]) -> None:
    lab = Lab("a model", "a CPU", "4x8x6", "", False, Ceilings("", 1, 1), [replace(point(1, 10, 1), **figures)], False)
    assert ["TP=1 is faster than this machine's limits" in told for told in remarks(lab)] == [True] * bool(figures)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_picture_has_what_was_expected_beside_what_was_measured(on_gpus: bool) -> None:
    """Replicas on CPUs would share the cores: there is no line for them."""
    planned = {"planned_ttft_ms": 200.0, "planned_tpot_ms": 8.0} if on_gpus else {}
    points = [replace(point(tp, 10, 1), **planned) for tp in (1, 2)]
    lab = Lab("a model", "a machine", "4x8x6", "", False, Ceilings("", 1, 1), points, on_gpus)
    (axes,) = draw(lab).axes
    lines = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}
    names = ["replicas of TP=1, each on its own"] * on_gpus + ["measured"]
    assert list(lines) == [*names, "planned" if on_gpus else "the most that memory and products allow"]
    assert lines.popitem()[1] == pytest.approx([24e3 / (200 + 5 * 8) if on_gpus else 24e3 / (100 + 5 * 5)] * 2)
