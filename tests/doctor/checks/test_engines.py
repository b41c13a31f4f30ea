"""Engines, firmware, a minute of watching and the steps of an install: each rule fires on its case and on no other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.doctor.checks import engines, firmware, watched
from phalanx.doctor.checks.deployment import Deployment
from phalanx.doctor.facts import FabricManager, Facts, Watched
from phalanx.doctor.gather.software import engine_versions
from phalanx.doctor.gather.watch import watch
from phalanx.doctor.install_plan import ENGINES as INSTALLED
from phalanx.doctor.install_plan import install_plan
from phalanx.errors import ConfigError
from phalanx.models import catalog
from phalanx.plan.engines import ENGINES
from phalanx.plan.recipes.launch import _IMAGES
from tests.doctor.build_machines import change, hgx, no_bridge, spark
from tests.doctor.checks.test_gpus import laptop, said
from tests.doctor.gather import fake_nvml


def with_software(facts: Facts, **told: Any) -> Facts:
    return change(facts, software=change(facts.software, **told))


@pytest.mark.parametrize(
    ("found", "bounds", "expected"),
    [
        ("2.30.4", ">=2.30.4,<=2.30.7", True),
        ("2.30.8", ">=2.30.4,<=2.30.7", False),
        ("2.30", ">=2.30.4", False),
        ("0.8.0", "<0.8.0", False),
        ("0.11.1rc7", "<=0.11.1", True),
        ("2.20.5", "==2.20.5", True),
        (None, ">=0", False),
        ("", ">=0", False),
    ],
)
def test_bounds_of_versions(found: str | None, bounds: str, expected: bool) -> None:
    assert engines.holds(found, bounds) == expected


def test_every_known_pair_has_a_source_with_a_date_and_bounds_that_parse() -> None:
    told = engines.known_bad()
    assert len(told["pair"]) >= 15
    for pair in told["pair"]:
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", pair["source"])
        assert re.search(r"20\d\d-\d\d", pair["source"])
        for name, bounds in pair["needs"].items():
            assert name in {"nccl", "vllm", "sglang", "tensorrt_llm", "ray", "driver", "torch", "cuda", "connectx"}
            engines.holds("1.0", bounds)
        assert pair["level"] in ("error", "warning", "note")
    assert {each["engine"] for each in told["loads"]} == set(engines.NAMES)


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        (with_software(hgx(), nccl="2.28.9", engines={"vllm": "0.24.0"}, ray=None), ["ok"]),
        (with_software(hgx(), nccl="2.30.5"), []),
        (with_software(spark(), nccl="2.30.5", ray=None), ["warning"]),
        (with_software(hgx(), nccl="2.19.4"), ["warning"]),
        (with_software(no_bridge(), nccl="2.19.4"), []),
        (with_software(hgx(), nccl="2.21.5", engines={"vllm": "0.8.1"}), ["warning"]),
        (with_software(hgx(), nccl="2.28.9", torch_cuda="12.8", engines={"tensorrt_llm": "1.2.0"}), ["error"]),
        (with_software(hgx(), nccl="2.28.9", torch_cuda="13.0", engines={"tensorrt_llm": "1.2.0"}), ["ok"]),
        (with_software(hgx(), driver="545.29.02", nccl=None), ["error"]),
        (with_software(spark(), nccl="2.28.9", engines={"vllm": "0.11.0"}, ray=None), ["warning"]),
    ],
)
def test_known_bad_pairs(facts: Facts, levels: list[str]) -> None:
    assert [finding.level for finding in engines.engine_versions(facts)] == levels


def test_another_environment_is_read_without_being_run(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for name, version in (("vllm", "0.24.0"), ("nvidia_nccl_cu13", "2.30.4"), ("ray", "2.55.0"), ("torch", "2.11.0")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("cuda: str = '13.0'\n")
    told = engine_versions(tmp_path)
    assert told == {"vllm": "0.24.0", "torch": "2.11.0", "ray": "2.55.0", "nccl": "2.30.4", "cuda": "13.0"}
    found = list(engines.engine_versions(with_software(spark(), nccl="2.28.9", engines=told)))
    assert any("2.30.4" in finding.found for finding in found)
    with pytest.raises(ConfigError, match="site-packages"):
        engine_versions(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("facts", "model", "tp", "installed", "level"),
    [
        (hgx(), "Qwen2.5-72B", 8, {"vllm": "0.24.0"}, "error"),
        (hgx(), "Llama-3.3-70B", 8, {"vllm": "0.24.0"}, "ok"),
        (hgx(), "Llama-3.3-70B", 4, {"vllm": "0.6.0"}, "error"),
        (no_bridge(), "Llama-3.1-8B", 1, {"tensorrt_llm": "1.2.0"}, "error"),
    ],
)
def test_fp8_against_the_engine_that_is_to_load_it(
    facts: Facts, model: str, tp: int, installed: dict[str, str], level: str
) -> None:
    """Blocks that TP cuts, a version too old for them, cards without FP8."""
    asked = Deployment(tp=tp, model=model, spec=catalog.model(model), number_format="fp8")
    facts = with_software(facts, engines=installed)
    assert [finding.level for finding in engines.fp8_engine(facts, asked)] == [level]
    plain = Deployment(tp=tp, model=model, spec=catalog.model(model))
    assert list(engines.fp8_engine(facts, plain)) == []


def test_unlike_firmware_is_named() -> None:
    def cards(*versions: str) -> Facts:
        return change(hgx(), gpus=tuple(change(g, vbios=v) for g, v in zip(hgx().gpus, versions, strict=False)))

    assert said(list(firmware.firmware(cards("96.1", "96.1")))) == [("ok", "firmware")]
    odd = next(iter(firmware.firmware(cards("96.1", "96.1", "96.2"))))
    assert (odd.level, odd.code) == ("warning", "firmware")
    assert "96.2: GPU 2" in odd.found
    switches = change(hgx(), fabric_manager=FabricManager(switch_firmware=("1.0", "1.0", "1.1")))
    assert "NVSwitch" in next(iter(firmware.firmware(switches))).title
    assert list(firmware.firmware(laptop())) == []


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((Watched(0, 60, 90), Watched(1, 60, 88)), [("ok", "watched")]),
        ((Watched(0, 60, 90, {"hw-thermal": 0.2}), Watched(1, 60, 88)), [("warning", "watched")]),
        ((Watched(0, 60, 90, {"hw-thermal": 0.01, "power-cap": 0.9}), Watched(1, 60, 88)), [("ok", "watched")]),
        ((Watched(0, 60, 90), Watched(1, 60, 10)), [("note", "watched")]),
        ((), []),
    ],
)
def test_a_minute_of_watching(seen: tuple[Watched, ...], expected: list[tuple[str, str]]) -> None:
    assert said(list(watched.watched(change(hgx(), watched=seen)))) == expected


def test_watching_counts_samples() -> None:
    """Two rounds of eight cards; one is held down by heat in one of them."""
    box = fake_nvml.hgx()
    rounds = []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        box.gpus[3].answers["CurrentClocksEventReasons"] = 0x40  # type: ignore[union-attr]

    for gpu in box.gpus:
        gpu.answers["UtilizationRates"] = SimpleNamespace(gpu=50, memory=10)  # type: ignore[union-attr]
    found = watch(2, box, sleep)
    assert [each.utilisation for each in found] == [50] * 8
    assert found[3].throttle == {"hw-thermal": 0.5}
    assert found[0].throttle == {}
    assert rounds == [1.0]


SYSTEMS = {
    "Ubuntu 24.04.3 LTS": ("ubuntu2404", "apt-get -y install nvidia-open-580", "nvidia-fabricmanager-"),
    "Ubuntu 22.04.5 LTS": ("ubuntu2204", "apt-get -y install nvidia-open-580", "nvidia-fabricmanager-"),
    "Rocky Linux 9.6 (Blue Onyx)": ("rhel9", "nvidia-driver:580-open", "nvidia-fabric-manager-"),
    "Debian GNU/Linux 12 (bookworm)": ("debian12", "apt-get -y install nvidia-open-580", "nvidia-fabricmanager-"),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_steps_of_an_install_fit_the_system(name: str) -> None:
    old = with_software(change(hgx(), system=change(hgx().system, os=name)), driver="550.54.15")
    script = install_plan(old, "vllm")
    for words in (*SYSTEMS[name], "cuda-toolkit-13-0", "vllm==0.24.0", "torch==2.11.0", "whl/cu130"):
        assert words in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_what_is_there_is_kept_and_what_does_not_apply_left_out() -> None:
    ubuntu = change(hgx(), system=change(hgx().system, os="Ubuntu 24.04.3 LTS"))
    kept = install_plan(with_software(ubuntu, driver="580.95.05"))
    assert "580.95.05 is there" in kept
    assert "install nvidia-open" not in kept
    assert "full-upgrade" in install_plan(change(spark(), system=change(spark().system, os="DGX OS 7.5.0")))
    windows = change(ubuntu, system=change(ubuntu.system, kernel="5.15.153.1-microsoft-standard-WSL2"))
    assert "Install none inside WSL" in install_plan(windows)
    assert "fabricmanager" not in install_plan(windows)
    assert "whl/cpu" in install_plan(laptop())
    with pytest.raises(ConfigError, match="Known: Ubuntu"):
        install_plan(change(hgx(), system=change(hgx().system, os="Arch Linux")))
    with pytest.raises(ConfigError, match="Use phalanx, vllm"):
        install_plan(hgx(), "llama.cpp")


def test_installed_engines_are_those_the_recipes_start() -> None:
    """The planner's versions, the images of its recipes and these pins are one."""
    for name, (package, _) in INSTALLED.items():
        if name != "phalanx":
            pinned = package.split("==")[1].split()[0].strip("'")
            assert pinned.startswith(ENGINES[name].version)
            assert pinned in _IMAGES["NVIDIA", name]
