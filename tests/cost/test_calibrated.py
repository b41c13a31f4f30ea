"""A measurement replaces what the cost model assumes of a link, and slows a card by what it lacks to a healthy one."""

from __future__ import annotations

import csv
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.calibrated import bandwidth_factor, calibrated_all_reduce, compute_factor
from phalanx.cost.price import Rates, Roofline, combine
from phalanx.cost.work import count_work
from phalanx.engine.step_sums import StepSums
from phalanx.models import catalog
from phalanx.spec.calibration import AllReduceTimes, Calibration, GpuShare
from phalanx.spec.machine import Link, Machine
from tests.shared_data import shared_file

NVSWITCH = Machine.parse("8xH100-SXM").link(8)
PCIE = Link("pcie", 25e9)
HEALTHY = GpuShare(0, "H100-SXM", 0.90, 0.79, 0.65)
TABLES = (
    AllReduceTimes(2, (8192, 32768, 131072), (10.0, 40.0, 160.0)),
    AllReduceTimes(8, (8192, 32768, 131072), (90.0, 100.0, 360.0)),
)


def calibration(*gpus: GpuShare, tables: tuple[AllReduceTimes, ...] = ()) -> Calibration:
    return Calibration("2026-11-15T10:00:00Z", "8xH100-SXM", "box", "a test", gpus or (HEALTHY,), tables)


def microseconds(size: float, ranks: int = 2, link: Link = NVSWITCH, implementation: str = "nccl") -> float:
    return 1e6 * calibrated_all_reduce(size, ranks, link, implementation, calibration(tables=TABLES))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (8192, 10.0),
        (32768, 40.0),
        (131072, 160.0),
        (16384, 20.0),
        (65536, 80.0),
        (64, 10.0),
        (2 * 131072, 160.0 + 131072 * 120 / (131072 - 32768)),
    ],
    ids=["smallest", "measured", "largest", "between", "between", "below: latency", "above: bandwidth"],
)
def test_nccl_takes_as_long_as_measured(size: int, expected: float) -> None:
    assert microseconds(size) == pytest.approx(expected)


def test_between_rank_counts_times_go_straight_in_logarithms() -> None:
    """4 is half way between 2 and 8 in logarithms: the geometric mean of 10 and 90."""
    assert microseconds(8192, 4) == pytest.approx(30.0)
    assert microseconds(8192, 8) == pytest.approx(90.0)


def test_what_was_not_measured_is_the_cost_models() -> None:
    assert microseconds(8192, 16, PCIE) == pytest.approx(1e6 * all_reduce_seconds(8192, 16, PCIE, "nccl"))
    only_eight = calibration(tables=TABLES[1:])
    assert calibrated_all_reduce(8192, 4, NVSWITCH, "nccl", only_eight) == all_reduce_seconds(8192, 4, NVSWITCH, "nccl")
    for given_none in (None, calibration()):
        assert calibrated_all_reduce(8192, 4, NVSWITCH, "vllm", given_none) == all_reduce_seconds(
            8192, 4, NVSWITCH, "vllm"
        )
    assert microseconds(8192, 1) == 0.0


@pytest.mark.parametrize("implementation", ["vllm", "sglang", "trtllm", "nccl"])
def test_off_nvswitch_every_engine_uses_nccl_and_takes_as_long_as_measured(implementation: str) -> None:
    assert microseconds(32768, 2, PCIE, implementation) == pytest.approx(40.0)


@pytest.mark.parametrize(("slower", "expected"), [(2.0, 2.0), (1.0, 1.0), (0.5, 1 / 1.03)])
def test_an_engines_own_kernels_slow_down_as_nccl_does_and_hardly_speed_up(slower: float, expected: float) -> None:
    by_nccl = all_reduce_seconds(65536, 4, NVSWITCH, "nccl")
    own = all_reduce_seconds(65536, 4, NVSWITCH, "vllm")
    assert own < by_nccl
    found = calibration(tables=(AllReduceTimes(4, (65536,), (slower * by_nccl * 1e6,)),))
    assert calibrated_all_reduce(65536, 4, NVSWITCH, "vllm", found) == pytest.approx(own * expected)


@given(
    st.lists(st.floats(1, 1e4), min_size=2, max_size=8),
    st.floats(1, 1e10),
    st.floats(1, 1e3),
)
def test_a_larger_message_never_takes_less_where_measured_times_grow(
    steps: list[float], size: float, larger: float
) -> None:
    times = tuple(sum(steps[: count + 1]) for count in range(len(steps)))
    table = AllReduceTimes(4, tuple(8192 << power for power in range(len(times))), times)
    found = calibration(tables=(table,))
    small, large = (calibrated_all_reduce(each, 4, PCIE, "nccl", found) for each in (size, size * larger))
    assert small <= large * (1 + 1e-9)


def test_public_times_of_nccl_on_h100_are_found_again_from_every_other_size() -> None:
    """Sizes that a calibration has not seen, up to eight times its largest, within 25 %; half of them within 5 %."""
    measured: dict[int, dict[int, float]] = {}
    with shared_file("h100_sxm_nccl2.29.2_collectives.csv").open() as file:
        for row in csv.DictReader(file):
            if row["op_name"] == "all_reduce" and row["nccl_dtype"] == "half":
                measured.setdefault(int(row["num_gpus"]), {})[int(row["bytes"])] = float(row["latency_us"])
    assert measured
    errors = []
    for ranks, times in measured.items():
        seen = {size: time for size, time in times.items() if 8192 <= size <= 2**26 and size.bit_length() % 2}
        table = AllReduceTimes(ranks, tuple(seen), tuple(seen.values()))
        for size in (size for size in times if size >= 8192 and size not in seen):
            found = 1e6 * calibrated_all_reduce(size, ranks, NVSWITCH, "nccl", calibration(tables=(table,)))
            errors.append(abs(found / times[size] - 1))
    assert max(errors) < 0.25
    assert median(errors) < 0.05


def test_a_card_counts_by_what_it_lacks_to_a_healthy_one() -> None:
    assert bandwidth_factor(None) == compute_factor(None, "bf16") == 1.0
    assert bandwidth_factor(calibration()) == compute_factor(calibration(), "bf16") == 1.0
    slow = GpuShare(1, "H100-SXM", 0.60, 0.395, 0.26)
    assert bandwidth_factor(calibration(HEALTHY, slow)) == pytest.approx(0.60 / 0.90)
    assert compute_factor(calibration(HEALTHY, slow), "bf16") == pytest.approx(0.5)
    assert compute_factor(calibration(slow, HEALTHY), "fp8") == pytest.approx(0.4)


def test_a_card_that_beats_a_healthy_one_gains_three_per_cent_at_most() -> None:
    fast = calibration(GpuShare(0, "RTX-4090", 0.99, 0.99, 0.99))
    assert bandwidth_factor(fast) == compute_factor(fast, "bf16") == compute_factor(fast, "fp8") == 1.03


def test_a_format_that_was_not_measured_goes_by_bf16_and_without_that_by_the_datasheet() -> None:
    assert compute_factor(calibration(GpuShare(0, "A100", 0.9, 0.395)), "fp8") == pytest.approx(0.5)
    assert compute_factor(calibration(GpuShare(0, "A100", 0.9)), "bf16") == 1.0


@pytest.mark.parametrize(("model", "weights"), [("Llama-3.3-70B", "fp8"), ("Qwen3-235B-A22B", "fp8")])
def test_all_that_reads_memory_slows_by_the_bandwidth_and_all_that_multiplies_by_the_rate(
    model: str, weights: str
) -> None:
    """The experts too: their fitted dependence on a GPU's datasheet does not hide a card in bad health."""
    machine = Machine.parse("8xH100-SXM")
    healthy = Roofline(count_work(catalog.model(model), 8, weights, "bf16"), machine.gpus[0], NVSWITCH, "vllm")
    ill = replace(healthy, calibration=calibration(GpuShare(0, "H100-SXM", 0.45, 0.395, 0.325)))
    step = StepSums(8, 8000, 512, 512 * 256, 1)
    before, after = healthy.of(step), ill.of(step)
    for name in ("linear_read", "expert_read", "head_read", "cache_read", "activations"):
        assert getattr(after, name) == pytest.approx(2 * getattr(before, name))
    for name in ("linear_compute", "expert_compute", "head_compute", "prompt_attention"):
        assert getattr(after, name) == pytest.approx(2 * getattr(before, name))
    assert after.all_reduce == before.all_reduce
    rates = Rates(0.8, 0.7, 0.9, 0.8, 0.4, 0.16, 0.8, 0.5, 1.2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    slow, fast = combine(after, rates), combine(before, rates)
    assert slow.weights == pytest.approx(2 * fast.weights)
    assert slow.experts == pytest.approx(2 * fast.experts)
