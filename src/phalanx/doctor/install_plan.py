"""From a bare machine to one that serves: driver, toolkit, fabric manager and environment for this system, pinned."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.checks.products import is_spark, needs_switch
from phalanx.doctor.checks.software import OLDEST_DRIVER, version
from phalanx.doctor.facts import Facts
from phalanx.errors import ConfigError
from phalanx.version import __version__

DRIVER_BRANCH = 580
"""The driver's branch for CUDA 13; NVIDIA, CUDA Compatibility, table 1 (read 2026-11-15)."""
TOOLKIT = "13-0"
_TORCH = "2.11.0"
_WHEELS = "https://download.pytorch.org/whl/cu130"
_REPOSITORY = "https://developer.download.nvidia.com/compute/cuda/repos"
_KEYRING = "cuda-keyring_1.1-1_all.deb"
ENGINES = {
    "phalanx": (
        f"'phalanx[serve] @ file:///root/phalanx-{__version__}-py3-none-any.whl'  # made by make dist",
        f"torch=={_TORCH}",
    ),
    "vllm": ("vllm==0.24.0", f"torch=={_TORCH}"),
    "sglang": ("'sglang[all]==0.5.9'", "torch==2.9.1"),
    "trtllm": ("tensorrt_llm==1.2.0 --extra-index-url https://pypi.nvidia.com", "torch==2.9.1"),
}
"""Each engine at the version that the planner's recipes start, and the torch that it was built with."""


@dataclass(frozen=True)
class _System:
    """How a distribution installs: its name in NVIDIA's repository, and by what."""

    repository: str
    by_apt: bool


def install_plan(facts: Facts, engine: str = "phalanx") -> str:
    """A script to read first, then to run. What is there already is left alone and said."""
    if engine not in ENGINES:
        raise ConfigError("unknown_engine", f"No steps are known for {engine!r}.", f"Use {', '.join(ENGINES)}.")
    steps = [_title(facts, engine)]
    if facts.gpus or is_spark(facts):
        system = _system(facts)
        steps += [_driver(facts, system), _toolkit(facts, system), _fabric(facts, system)]
    steps += [_limits(facts), _environment(facts, engine), _check(facts)]
    return "\n\n".join(step for step in steps if step) + "\n"


def _title(facts: Facts, engine: str) -> str:
    cards = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or "no GPU"
    return (
        f"#!/usr/bin/env bash\n# {engine} on {facts.system.os or 'this system'} ({facts.system.architecture or '?'}), "
        f"{cards}. Read it, then run it as root.\nset -euo pipefail"
    )


def _is_wsl(facts: Facts) -> bool:
    return "microsoft" in (facts.system.kernel or "").lower()


def _system(facts: Facts) -> _System:
    name = facts.system.os or ""
    if _is_wsl(facts):
        return _System("wsl-ubuntu", by_apt=True)
    if found := re.search(r"Ubuntu (2[24])\.04", name):
        return _System(f"ubuntu{found[1]}04", by_apt=True)
    if "DGX OS" in name or is_spark(facts):
        return _System("ubuntu2404", by_apt=True)
    if found := re.search(r"Debian.*\b(1[23])\b", name):
        return _System(f"debian{found[1]}", by_apt=True)
    if found := re.search(r"(?:Red Hat|Rocky|Alma|Oracle|CentOS).*?\b(8|9|10)(?:\.\d+)?\b", name):
        return _System(f"rhel{found[1]}", by_apt=False)
    raise ConfigError(
        "unknown_system",
        f"There are no steps for {name or 'a system that does not tell its name'}.",
        "Known: Ubuntu 22.04 and 24.04, Debian 12 and 13, Red Hat and its kin 8 to 10, DGX OS, WSL2. Else run the "
        "engine's container on the vendor's driver.",
    )


def _architecture(facts: Facts) -> str:
    return "sbsa" if facts.system.architecture == "aarch64" else "x86_64"


def _add_repository(facts: Facts, system: _System) -> str:
    place = f"{_REPOSITORY}/{system.repository}/{_architecture(facts)}"
    if system.by_apt:
        return f"curl -fsSLO {place}/{_KEYRING}\ndpkg -i {_KEYRING}\napt-get update"
    return f"dnf config-manager --add-repo {place}/cuda-{system.repository}.repo"


def _driver(facts: Facts, system: _System) -> str:
    if _is_wsl(facts):
        return f"# 1. Driver: on Windows, {DRIVER_BRANCH} or newer. Install none inside WSL.\n" + _add_repository(
            facts, system
        )
    if is_spark(facts):
        return (
            "# 1. Driver and firmware come with DGX OS: one update for both.\napt-get update\napt-get -y full-upgrade"
        )
    has = version(facts.software.driver)
    head = f"# 1. Driver, branch {DRIVER_BRANCH} with open kernel modules: CUDA 13 needs {OLDEST_DRIVER[13]}.\n"
    repository = _add_repository(facts, system)
    if has and has[0] >= OLDEST_DRIVER[13]:
        return f"{head}# {facts.software.driver} is there and new enough: kept.\n{repository}"
    install = f"apt-get -y install nvidia-open-{DRIVER_BRANCH}"
    if not system.by_apt:
        install = f"dnf -y module install nvidia-driver:{DRIVER_BRANCH}-open"
    return f"{head}{repository}\n{install}"


def _toolkit(facts: Facts, system: _System) -> str:
    if is_spark(facts):
        return "# 2. Toolkit: part of DGX OS."
    by = "apt-get -y install" if system.by_apt else "dnf -y install"
    return (
        f"# 2. Toolkit {TOOLKIT.replace('-', '.')}, for engines that compile kernels when they start.\n"
        f"{by} cuda-toolkit-{TOOLKIT}"
    )


def _fabric(facts: Facts, system: _System) -> str:
    """NVSwitch boards need the fabric manager at the driver's very version, from Blackwell on with NVLSM beside it."""
    board = [gpu for gpu in facts.gpus if needs_switch(gpu)]
    if not board or _is_wsl(facts):
        return ""
    wanted, has = facts.software.driver, facts.fabric_manager.version if facts.fabric_manager else None
    if wanted and wanted == has:
        return f"# 3. Fabric manager: {has}, equal to the driver. Kept."
    lines = ["# 3. Fabric manager, at the driver's version to the last digit."]
    if system.by_apt:
        asked = f"$(dpkg-query -W -f='${{Version}}' nvidia-open-{DRIVER_BRANCH} | cut -d- -f1)"
        exact = version(wanted) and version(wanted)[0] >= OLDEST_DRIVER[13]
        lines.append(f"DRIVER={wanted if exact else asked}")
        lines.append('apt-get -y install "nvidia-fabricmanager-${DRIVER%%.*}=$DRIVER-1"')
    else:
        lines.append("DRIVER=$(rpm -q --qf '%{VERSION}' nvidia-driver)")
        lines.append('dnf -y install "nvidia-fabric-manager-$DRIVER"')
    if any(version(gpu.capability) >= (10, 0) for gpu in board):
        lines.append("apt-get -y install nvlsm" if system.by_apt else "dnf -y install nvlsm")
    return "\n".join([*lines, "systemctl enable --now nvidia-fabricmanager"])


def _limits(facts: Facts) -> str:
    lines = [
        "# 4. Memory that network adapters pin.",
        "echo '* - memlock unlimited' > /etc/security/limits.d/90-memlock.conf",
    ]
    if facts.gpus and not _is_wsl(facts) and not is_spark(facts):
        lines.append("systemctl enable --now nvidia-persistenced")
    if is_spark(facts):
        lines.append("echo 'vm.swappiness = 1' > /etc/sysctl.d/90-phalanx.conf && sysctl --system >/dev/null")
    return "\n".join(lines)


def _environment(facts: Facts, engine: str) -> str:
    package, torch = ENGINES[engine]
    wheels = f" --index-url {_WHEELS}" if facts.gpus else " --index-url https://download.pytorch.org/whl/cpu"
    return (
        f"# 5. An environment of its own.\npython3 -m venv /opt/{engine}\n"
        f"/opt/{engine}/bin/pip install {torch}{wheels}\n/opt/{engine}/bin/pip install {package}"
    )


def _check(facts: Facts) -> str:
    measure = " --measure" if facts.gpus else ""
    return f"# 6. After a reboot (for the driver): is it what it should be?\n# phalanx doctor{measure}"
