"""Machines are written as people write them; the catalogue holds what drivers and data sheets say."""

from __future__ import annotations

import pytest

from phalanx.spec.machine import Gpu, Machine, MachineError, gpus


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("4xH100-SXM", ["H100-SXM"] * 4),
        ("8xH200", ["H200-SXM"] * 8),
        ("h200 sxm", ["H200-SXM"]),
        ("4xDGX-Spark", ["DGX-Spark"] * 4),
        ("2xRTX4090+1xRTX3090", ["RTX4090", "RTX4090", "RTX3090"]),
        ("2 x rtx pro 6000", ["RTX-PRO-6000"] * 2),
        ("NVIDIA H100 80GB HBM3", ["H100-SXM"]),
    ],
)
def test_a_machine_is_read_as_written(text: str, names: list[str]) -> None:
    assert [gpu.name for gpu in Machine.parse(text).gpus] == names


@pytest.mark.parametrize("text", ["4xH100-SXM", "2xRTX4090+1xRTX3090", "1xMI300X"])
def test_a_machine_spells_its_name_back(text: str) -> None:
    assert Machine.parse(text).name == text


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("0xH100-SXM", "bad_count", "1xH100-SXM"),
        ("-2xH100-SXM", "bad_count", "1 to 1024"),
        ("4xH1000", "unknown_gpu", "H100-SXM"),
        ("4xRTX4080", "unknown_gpu", "RTX4090"),
        ("4xH100-SXM+", "bad_machine", "4xH100-SXM"),
        ("", "bad_machine", "4xH100-SXM"),
        ("2xH100-SXM+2xMI300X", "mixed_vendors", "2xH100-SXM"),
    ],
)
def test_a_bad_machine_is_told_the_nearest_good_one(text: str, code: str, said: str) -> None:
    with pytest.raises(MachineError) as error:
        Machine.parse(text)
    assert error.value.code == code
    assert said in error.value.fix


def test_the_catalogue_is_complete_and_dated() -> None:
    assert len(gpus()) == 30
    for gpu in gpus():
        assert gpu.memory_bytes > 20e9, gpu.name
        assert 0.2e12 < gpu.bandwidth < 10e12, gpu.name
        assert gpu.peak("fp8") >= gpu.peak("bf16") > 50e12, gpu.name
        assert gpu.power_w > 50, gpu.name
        assert gpu.source, gpu.name
        assert gpu.price.date or not (gpu.price.rent or gpu.price.buy or gpu.price.own), gpu.name
        assert gpu.price.rent is None or sorted(gpu.price.rent) == list(gpu.price.rent), gpu.name


def test_memory_is_what_the_driver_reports() -> None:
    assert Gpu.named("H100-SXM").memory_bytes == 81559 * 2**20
    assert Gpu.named("H200").memory_bytes == 143771 * 2**20


def test_a_format_the_gpu_cannot_multiply_runs_at_its_bf16_rate() -> None:
    a100 = Gpu.named("A100")
    assert a100.peak("fp8") == a100.peak("bf16") == 312e12


def test_the_least_memory_bounds_a_mixed_machine() -> None:
    machine = Machine.parse("1xRTX5090+1xRTX4090+1xRTX3090")
    assert machine.is_mixed
    assert machine.smallest.name == "RTX4090"
    assert machine.take(1).smallest.name == "RTX5090"


@pytest.mark.parametrize(
    ("text", "ranks", "kind", "gigabytes"),
    [
        ("8xH100-SXM", 8, "nvswitch", 450),
        ("4xH100-PCIe", 2, "nvlink-bridge", 300),
        ("4xH100-PCIe", 4, "pcie", 50),
        ("2xRTX4090", 2, "pcie", 25),
        ("1xRTX5090+1xRTX4090", 2, "pcie", 25),
        ("2xDGX-Spark", 2, "roce", 23.7),
        ("16xH100-SXM", 16, "ib", 50),
        ("8xMI300X", 8, "mesh", 448),
    ],
)
def test_ranks_talk_over_the_narrowest_link_between_them(text: str, ranks: int, kind: str, gigabytes: float) -> None:
    link = Machine.parse(text).link(ranks)
    assert (link.kind, link.bandwidth) == (kind, gigabytes * 1e9)
