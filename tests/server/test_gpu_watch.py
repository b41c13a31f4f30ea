"""What the GPUs draw and hold, beside a driver that tells, tells half, is not there, or hangs."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.doctor.gather.nvml import NvmlError
from phalanx.server import gpu_watch as module
from phalanx.server.gpu_watch import GpuReading, GpuWatch
from phalanx.server.metrics import Metrics
from tests.doctor.gather.fake_nvml import LIBRARY_NOT_FOUND, LOST, Fails, FakeNvml, hgx, hgx_gpu, memory, spark


def watch(nvml: Any, visible: str | None = None) -> GpuWatch:
    return GpuWatch(nvml, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def looked(nvml: Any, visible: str | None = None) -> list[GpuReading]:
    watching = watch(nvml, visible)
    watching.look()
    return watching.readings()


def gauges(watching: GpuWatch) -> dict[tuple[str, str], float]:
    metrics = Metrics("m", vllm_names=False)
    metrics.add(watching)
    families = text_string_to_metric_families(metrics.expose().decode())
    return {
        (each.name.removeprefix("phalanx:gpu_"), each.labels["gpu"]): each.value
        for family in families
        for each in family.samples
        if each.name.startswith("phalanx:gpu_")
    }


def test_every_gpu_is_told_in_gib_watts_and_degrees() -> None:
    readings = looked(FakeNvml([hgx_gpu(0), hgx_gpu(1, MemoryInfo=memory(81920, 40960))]))
    assert readings[1] == GpuReading(1, "NVIDIA H100 80GB HBM3", 40.0, 80.0, 71.205, 700.0, 31)
    assert len(looked(hgx())) == 8


@pytest.mark.parametrize(("visible", "shown"), [("2,0", [0, 2]), ("GPU-1", [1]), (" 3 ", [3]), ("", list(range(8)))])
def test_only_gpus_that_the_engine_may_use_are_shown(visible: str, shown: list[int]) -> None:
    assert [reading.gpu for reading in looked(hgx(), visible)] == shown


def test_what_a_card_does_not_tell_is_left_out() -> None:
    (reading,) = looked(spark())
    assert (reading.memory, reading.memory_used, reading.watts_limit) == (None, None, None)
    assert (reading.watts, reading.celsius) == (11.17, 41)
    assert [each.gpu for each in looked(FakeNvml([Fails(LOST), hgx_gpu(1)]))] == [1]


def test_they_are_gauges_for_prometheus_once_seen() -> None:
    watching = watch(FakeNvml([hgx_gpu(0, MemoryInfo=memory(81920, 1024))]))
    assert gauges(watching) == {}
    watching.look()
    assert gauges(watching) == {
        ("memory_used_bytes", "0"): 2**30,
        ("memory_total_bytes", "0"): 80 * 2**30,
        ("power_watts", "0"): 71.205,
        ("power_limit_watts", "0"): 700,
        ("temperature_celsius", "0"): 31,
    }


def test_no_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = FakeNvml([], system={"Init": Fails(LIBRARY_NOT_FOUND)})
    monkeypatch.setattr(module, "binding", lambda: absent)
    watching = GpuWatch()
    with pytest.raises(NvmlError):
        watching.look()
    watching._watch()
    assert watching.readings() == []
    assert gauges(watching) == {}


def test_what_was_seen_too_long_ago_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    watching = watch(hgx())
    watching.look()
    now += module.STALE_S - 0.1
    assert len(watching.readings()) == 8
    now += 0.2
    assert watching.readings() == []
