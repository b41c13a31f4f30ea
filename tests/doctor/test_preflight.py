"""Before serving: refused is only what cannot work."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from phalanx.doctor.facts import Facts
from phalanx.doctor.preflight import preflight, verdict
from phalanx.errors import ConfigError
from tests.doctor.build_machines import change, hgx, mig_on, mixed_cards, no_bridge, no_fabric_manager, spark, throttled
from tests.doctor.checks.test_gpus import BARE, machine


def all_cut() -> Facts:
    return change(hgx(), gpus=tuple(change(gpu, mig="on") for gpu in hgx().gpus))


@pytest.mark.parametrize(
    ("facts", "tp", "environ", "code"),
    [
        (hgx(), 8, {}, None),
        (hgx(), 9, {}, "too_few_gpus"),
        (hgx(), 4, {"CUDA_VISIBLE_DEVICES": "0,1"}, "too_few_gpus"),
        (hgx(), 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (hgx(), 2, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "too_few_gpus"),
        (no_bridge(), 1, {}, None),
        (change(no_bridge(), gpus=tuple(change(gpu, capability="7.5") for gpu in no_bridge().gpus)), 1, {}, "kernels"),
        (machine(BARE), 1, {}, None),
        (change(mixed_cards(), gpus=(*mixed_cards().gpus, change(hgx().gpus[0], index=3))), 1, {}, None),
        (all_cut(), 2, {}, "mig"),
        (all_cut(), 1, {}, None),
        (mig_on(), 2, {}, None),
        (spark(), 1, {}, None),
    ],
)
def test_what_cannot_work_is_refused(facts: Facts, tp: int, environ: dict[str, str], code: str | None) -> None:
    refused, _ = verdict(facts, tp, environ)
    assert (refused.code if refused else None) == code


def test_what_is_only_slow_becomes_lines_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING):
        preflight(8, read=throttled)
    assert any("Clocks are held down by heat: GPU 3" in line for line in caplog.messages)
    caplog.clear()
    preflight(8, read=hgx)
    assert not caplog.messages
    preflight(8, read=no_fabric_manager)
    assert any("The fabric manager does not run" in line for line in caplog.messages)


def test_a_refusal_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError) as error:
        preflight(16, read=hgx)
    assert (error.value.code, error.value.fix) == ("too_few_gpus", "Use TP <= 8")


@pytest.mark.parametrize(("device", "visible"), [("cpu", None), ("auto", ""), ("auto", "-1")])
def test_the_processor_is_asked_nothing(device: str, visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Any:
        raise AssertionError("nothing is to be read")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    preflight(64, device, read=read)


def test_a_torch_without_cuda_serves_on_the_processor_whatever_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = change(hgx(), software=change(hgx().software, torch="2.13.0+cpu", torch_cuda=None))
    preflight(64, read=lambda: plain)


def test_it_imports_no_torch_and_without_gpus_no_checks() -> None:
    script = (
        "import sys; from phalanx.doctor.preflight import preflight; "
        "from phalanx.doctor.facts import Facts, Software, System; "
        "preflight(2, read=lambda: Facts('', System('box'), Software('', ''))); "
        "assert not {'torch', 'phalanx.doctor.checks', 'phalanx.plan.choose'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
