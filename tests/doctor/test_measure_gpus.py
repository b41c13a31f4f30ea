"""GPUs as their ranks report them: known by UUID, held against their datasheet and the cost model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.doctor import measure as measuring
from phalanx.doctor.facts import Facts, GpuFacts, Measured, Rate, Software, System
from phalanx.doctor.measure import corrupt, measure
from phalanx.doctor.measure.messages import Began, Checked, Finished, MeasureReport, Rated, Timed
from phalanx.errors import ConfigError
from phalanx.spec.machine import Machine


class ScriptedRanks:
    """What ranks of a healthy box would report; rank r of CUDA is GPU `order[r]` of the driver."""

    name = "NVIDIA H100 80GB HBM3"
    order = (1, 0, 2, 3, 4, 5, 6, 7)

    def __init__(self, task: str, device: str, count: int) -> None:
        assert device == "cuda"
        self.task, self.count = task, count

    def __enter__(self) -> ScriptedRanks:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def reports(self) -> Iterator[tuple[int, MeasureReport]]:
        for rank in range(self.count):
            yield rank, Began("it")
            if self.task == "rates":
                yield rank, Rated(self.name, f"uuid-{self.order[rank]}", 3000.0 + rank, {"bf16": 780.0, "fp8": 1300.0})
            else:
                yield rank, Timed(2**20, 20.0 + rank)
                yield rank, Checked(2**20, 0, 0, checksum=7, expected=7)
            yield rank, Finished()


def box(count: int, name: str = ScriptedRanks.name) -> Facts:
    gpus = tuple(GpuFacts(index, name, uuid=f"GPU-uuid-{index}") for index in range(count))
    return Facts("", System("box"), Software("3.11", "0", torch_sees_gpus=count), gpus)


@pytest.fixture
def measured_box(monkeypatch: pytest.MonkeyPatch) -> Measured:
    monkeypatch.setattr(measuring, "Ranks", ScriptedRanks)
    return measure(box(8))


def test_rates_stand_beside_the_datasheet_under_the_drivers_number(measured_box: Measured) -> None:
    first, second, *_ = measured_box.rates
    assert first == Rate(1, ScriptedRanks.name, 3000.0, 780.0, "bf16", 3350.0, 989.0, 1300.0, 1979.0)
    assert (second.gpu, second.copy_gbs) == (0, 3001.0)
    assert len(measured_box.rates) == 8


def test_all_reduces_run_over_every_power_of_two_and_the_slowest_rank_counts(measured_box: Measured) -> None:
    assert measured_box.backend == "nccl"
    assert [each.ranks for each in measured_box.all_reduces] == [2, 4, 8]
    assert [each.microseconds for each in measured_box.all_reduces] == [21.0, 23.0, 27.0]
    link = Machine.parse("8xH100-SXM").link(8)
    for each in measured_box.all_reduces:
        assert each.bus_gbs == pytest.approx(2**20 / each.microseconds * 2 * (each.ranks - 1) / each.ranks / 1e3)
        assert each.modelled_microseconds == pytest.approx(
            1e6 * all_reduce_seconds(2**20, each.ranks, link, "nccl"), rel=1e-9
        )
    assert measured_box.checked_bytes == (2 + 4 + 8) * 2**20


@pytest.mark.parametrize(("gpus", "asked", "expected"), [(6, None, [2, 4, 6]), (1, None, []), (8, 3, [3]), (8, 1, [])])
def test_rank_counts(gpus: int, asked: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Ranks", ScriptedRanks)
    found = measure(box(gpus), asked)
    assert [each.ranks for each in found.all_reduces] == expected
    assert found.backend == ("nccl" if expected else None)
    assert len(found.rates) == gpus


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="Use 1 to 4"):
        measure(box(4), 5)


def test_an_unknown_gpu_has_no_datasheet_and_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Ranks", ScriptedRanks)
    found = measure(box(2, "NVIDIA Prototype 9000"))
    assert all(rate.datasheet_gbs is None and rate.datasheet_tflops is None for rate in found.rates)
    assert [each.modelled_microseconds for each in found.all_reduces] == [None]


def test_a_gpu_that_the_driver_did_not_name_keeps_cudas_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Ranks", ScriptedRanks)
    facts = Facts("", System("box"), Software("3.11", "0", torch_sees_gpus=2), (GpuFacts(0, "NVIDIA L4"),))
    assert [(rate.gpu, rate.device) for rate in measure(facts).rates] == [
        (0, ScriptedRanks.name),
        (1, ScriptedRanks.name),
    ]


def test_a_rank_that_expects_another_sum_than_most_is_the_one_that_is_wrong() -> None:
    """Its result equals its own expectation, and both are wrong."""
    right, lying = Checked(8192, 4, 0, checksum=7, expected=7), Checked(8192, 4, 0, checksum=9, expected=9)
    assert [each.rank for each in corrupt({0: right, 1: lying, 2: right})] == [1]
