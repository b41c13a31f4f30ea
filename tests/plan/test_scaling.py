"""The scaling curve: equal batches, what bounds each point, and the picture of it; and systems that run no engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.plan.ask import PlanQuestion, answer, ask
from phalanx.plan.predict import predict
from phalanx.plan.scaling import scaling_curve
from phalanx.spec.workload import Workload

QUESTION = PlanQuestion("Llama-3.1-8B", "8xH100-SXM", engines="vllm", formats="bf16", concurrency=32, tps="1,2,4,8")


def test_every_degree_decodes_the_same_batch_and_none_beats_its_ranks() -> None:
    plan = ask(QUESTION)
    points = scaling_curve(plan)
    assert [point.tp for point in points] == [1, 2, 4, 8]
    assert len({point.batch for point in points}) == 1
    assert points[0].efficiency == 1
    assert all(first.efficiency > second.efficiency for first, second in pairwise(points))
    for point in points:
        assert sum(point.shares.values()) == pytest.approx(1)
        assert point.bound == max(point.shares, key=lambda name: point.shares[name])
    assert points[0].bound == "weights"
    assert points[0].shares["all-reduces"] == 0 < points[-1].shares["all-reduces"]


def test_a_point_is_the_speed_of_such_a_replica() -> None:
    """Against the simulation of as many clients on one replica, whose prompts take some of the time."""
    plan = ask(QUESTION)
    for point in scaling_curve(plan)[:2]:
        load = Workload(1024, 256, point.batch)
        found = predict(plan.spec, plan.machine, point.tp, "vllm", load, "bf16")
        assert found.throughput.mid < point.tokens_per_s < 2 * found.throughput.mid


def test_slow_links_bound_what_fast_ones_do_not() -> None:
    fast, slow = (
        scaling_curve(ask(PlanQuestion("Llama-3.1-8B", machine, engines="vllm", formats="fp8", tps="4")))[-1]
        for machine in ("4xH100-SXM", "4xRTX4090")
    )
    assert slow.shares["all-reduces"] > 1.2 * fast.shares["all-reduces"]


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scaling.png"
    answer(QUESTION, recipe=None, folder=None, as_json=True, plot=file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert '"scaling"' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["windows", "macos"])
def test_systems_without_these_engines_say_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match="do not run on"):
        ask(PlanQuestion("Llama-3.1-8B", "1xRTX4090", os=name))


def test_wsl_keeps_a_gibibyte_of_each_card() -> None:
    plain, inside = (
        ask(PlanQuestion("Llama-3.1-8B", "2xRTX4090", os=name, engines="vllm", formats="fp8", tps="2"))
        for name in ("linux", "wsl2")
    )
    assert plain.best is not None
    assert inside.best is not None
    less = plain.best.fit.tightest.kv_bytes - inside.best.fit.tightest.kv_bytes
    assert less == pytest.approx(0.9 * 2**30, rel=0.02)  # vLLM takes 0.9 of what is there
    with pytest.raises(ConfigError, match="Known: linux, wsl2"):
        ask(PlanQuestion("Llama-3.1-8B", "2xRTX4090", os="beos"))
