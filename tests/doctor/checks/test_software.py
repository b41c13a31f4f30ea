"""Versions that do not fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import software
from phalanx.doctor.facts import Facts
from tests.doctor.build_machines import change, hgx, spark
from tests.doctor.checks.test_gpus import machine, said, with_first


def versions(facts: Facts | None = None, **told: Any) -> Facts:
    facts = facts or hgx()
    return change(facts, software=change(facts.software, **told))


@pytest.mark.parametrize(
    ("driver", "driver_cuda", "cuda", "expected"),
    [
        ("580.95.05", "13.0", "13.0", [("ok", "driver_for_torch")]),
        ("610.43.02", "13.3", "12.8", [("ok", "driver_for_torch")]),
        ("570.195.03", "12.8", "13.0", [("error", "driver_for_torch")]),
        ("535.216.01", "12.2", "12.8", [("note", "driver_for_torch")]),
        ("535.216.01", None, "12.8", [("ok", "driver_for_torch")]),
        ("470.57", "11.4", "12.1", [("error", "driver_for_torch")]),
        (None, None, "13.0", []),
        ("580.95.05", "13.0", None, []),
        ("580.95.05", "13.0", "rocm", []),
    ],
)
def test_driver_and_torch(driver: str, driver_cuda: str, cuda: str, expected: list[tuple[str, str]]) -> None:
    facts = versions(driver=driver, driver_cuda=driver_cuda, torch_cuda=cuda)
    assert said(software.driver_for_torch(facts)) == expected


@pytest.mark.parametrize(
    ("capability", "cuda", "wrong"),
    [
        ("9.0", "12.1", False),
        ("9.0", "11.7", True),
        ("10.0", "12.6", True),
        ("10.0", "12.8", False),
        ("10.3", "12.8", True),
        ("12.0", "12.8", False),
        ("12.1", "12.8", True),
        ("12.1", "13.0", False),
        ("8.0", "11.0", False),
        (None, "11.0", False),
        ("9.0", None, False),
    ],
)
def test_torch_and_the_card(capability: str | None, cuda: str | None, wrong: bool) -> None:
    facts = versions(with_first(hgx(), capability=capability), torch_cuda=cuda)
    only = change(facts, gpus=facts.gpus[:1])
    assert said(software.torch_for_gpu(only)) == ([("error", "torch_for_gpu")] if wrong else [])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, [("ok", "torch_gpus")]),
        ({"torch": None}, [("note", "torch_gpus")]),
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, [("error", "torch_gpus")]),
        ({"torch_sees_gpus": 0}, [("error", "torch_gpus")]),
        ({"torch_sees_gpus": 4}, [("note", "torch_gpus")]),
        ({"torch_sees_gpus": None}, []),
    ],
)
def test_what_torch_sees(told: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(software.torch_gpus(versions(**told))) == expected
    assert said(software.torch_gpus(versions(machine(), **told))) == []


def test_two_nccls_wedge_a_spark_and_are_a_note_elsewhere() -> None:
    assert said(software.nccl(versions(spark(), system_nccl="2.28.9"))) == [("warning", "nccl")]
    assert said(software.nccl(versions(nccl="2.29.2", system_nccl="2.28.9"))) == [("note", "nccl")]
    assert said(software.nccl(versions(nccl="2.29.2", system_nccl="2.29.2"))) == [("ok", "nccl")]
    assert said(software.nccl(versions(system_nccl=None))) == []


def test_a_ray_that_cannot_ask_for_a_token() -> None:
    assert said(software.ray(versions(ray="2.51.1"))) == [("warning", "ray")]
    assert said(software.ray(versions(ray="2.52.0"))) == []
    assert said(software.ray(versions(ray=None))) == []


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cu130", (2, 13, 0)), ("580.95.05", (580, 95, 5)), ("dev", ()), (None, ()), ("", ())]
)
def test_versions_are_their_leading_numbers(text: str | None, numbers: tuple[int, ...]) -> None:
    assert software.version(text) == numbers
