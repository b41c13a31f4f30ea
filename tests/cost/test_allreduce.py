"""All-reduce times are those that were measured, and sensible between and beyond."""

from __future__ import annotations

import csv
import gzip
from statistics import median

import pytest

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.spec.machine import Link, Machine
from tests.shared_data import shared_file

NVSWITCH = Link("nvswitch", 450e9)
MIB = 2**20


@pytest.mark.parametrize("implementation", ["vllm", "sglang", "trtllm", "nccl"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_more_bytes_take_longer(implementation: str, ranks: int) -> None:
    times = [all_reduce_seconds(2**power, ranks, NVSWITCH, implementation) for power in range(8, 31)]
    assert times[0] > 2e-6
    assert times == sorted(times) or implementation == "nccl"
    assert times[-1] > 100 * times[0]


def test_eight_ranks_beat_four_for_large_messages_and_lose_for_small_ones() -> None:
    def time(size: int, ranks: int) -> float:
        return all_reduce_seconds(size, ranks, NVSWITCH, "vllm")

    assert time(256 * MIB, 8) < time(256 * MIB, 4)
    assert time(64 * 1024, 8) > time(64 * 1024, 4)


def test_rank_counts_between_the_tables_lie_between_them() -> None:
    two, three, four = (all_reduce_seconds(MIB, ranks, NVSWITCH, "vllm") for ranks in (2, 3, 4))
    assert two < three < four


def test_one_rank_needs_none() -> None:
    assert all_reduce_seconds(MIB, 1, NVSWITCH, "vllm") == 0


def test_a_faster_switch_helps_large_messages_only() -> None:
    faster = Link("nvswitch", 500e9)
    assert all_reduce_seconds(8192, 8, faster, "vllm") == all_reduce_seconds(8192, 8, NVSWITCH, "vllm")
    ratio = all_reduce_seconds(256 * MIB, 8, faster, "vllm") / all_reduce_seconds(256 * MIB, 8, NVSWITCH, "vllm")
    assert ratio == pytest.approx(0.9, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "table"),
    [("8xA100-SXM-80GB", "a100_sxm_vllm0.14.0_custom_allreduce"), ("8xB200", "b200_sxm_vllm0.24.0_custom_allreduce")],
)
def test_other_generations_take_what_was_measured_on_them(machine: str, table: str) -> None:
    """Sizes of that table are numbers of two bytes."""
    with gzip.open(shared_file(f"kernels/{table}.csv.gz"), "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] == "vllm_graph"]
    link = Machine.parse(machine).link(8)
    errors = []
    for row in rows:
        predicted = all_reduce_seconds(2 * int(row["message_size"]), int(row["num_gpus"]), link, "vllm")
        errors.append(abs(predicted * 1e3 / float(row["latency"]) - 1))
    assert len(errors) > 50
    assert median(errors) < 0.03


@pytest.mark.parametrize("implementation", ["vllm", "sglang", "trtllm", "flashinfer", "nccl"])
def test_small_messages_take_longer_on_b200_than_on_hopper(implementation: str) -> None:
    """7.8 us for 5.1 by vLLM's kernel on eight ranks, 26 for 16.5 by NCCL."""
    b200 = Machine.parse("8xB200").link(8)
    ratio = all_reduce_seconds(8192, 8, b200, implementation) / all_reduce_seconds(8192, 8, NVSWITCH, implementation)
    assert ratio == pytest.approx(7.8 / 5.1)


def test_pcie_is_slower_than_nvlink() -> None:
    pcie = Machine.parse("8xL40S").link(8)
    assert all_reduce_seconds(MIB, 8, pcie, "nccl") > 5 * all_reduce_seconds(MIB, 8, NVSWITCH, "nccl")


def test_published_dgx_spark_latencies_are_met() -> None:
    """NCCL over 200G RoCE: 35.2 us for 8 KiB on two nodes; 91.5 us for 10 KiB and 361 us for 2 MiB on four."""
    link = Machine.parse("4xDGX-Spark").link(4)
    for size, ranks, published in ((8192, 2, 35.2e-6), (10240, 4, 91.5e-6), (2 * MIB, 4, 360.8e-6)):
        assert all_reduce_seconds(size, ranks, link, "nccl") == pytest.approx(published, rel=0.15)


def test_measured_latencies_are_met() -> None:
    with shared_file("allreduce_h100_h200.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] in ("graph", "nccl-tests")]
    errors = []
    for row in rows:
        name = "nccl" if row["impl"] == "nccl" else row["framework"]
        predicted = all_reduce_seconds(int(row["bytes"]), int(row["num_gpus"]), NVSWITCH, name)
        errors.append(abs(predicted * 1e6 / float(row["latency_us"]) - 1))
    assert len(errors) > 1000
    assert median(errors) < 0.03
    assert sum(error < 0.25 for error in errors) > 0.85 * len(errors)
