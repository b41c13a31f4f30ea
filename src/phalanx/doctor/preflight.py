"""Before serving: what cannot work is refused, what will be slow is said. Cheap, and without torch."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from phalanx.doctor.facts import Facts, Software, System
from phalanx.doctor.finding import Finding
from phalanx.errors import ConfigError
from phalanx.version import __version__

log = logging.getLogger("phalanx.doctor")


def preflight(tp: int, device: str = "auto", read: Callable[[], Facts] | None = None) -> None:
    """Raises what cannot work on this machine's GPUs; the rest becomes lines of the log."""
    if device == "cpu" or not _may_see_gpus(os.environ):
        return
    facts = (read or _cheap_facts)()
    if not facts.gpus or (facts.software.torch and facts.software.torch_cuda is None):
        return
    refused, said = verdict(facts, tp, os.environ)
    for finding in said:
        log.warning("%s: %s. %s", finding.title, finding.found, finding.fix)
    if refused is not None:
        raise ConfigError(refused.code, f"{refused.title}: {refused.found}.", refused.fix)


def verdict(facts: Facts, tp: int, environ: Mapping[str, str]) -> tuple[Finding | None, list[Finding]]:
    """What makes it impossible, if anything; and what else is worth a line.

    Which of several unlike cards CUDA will choose is not known here: only what holds for all of them is refused.
    """
    from phalanx.doctor.checks import fabric, gpus, links, memory, power, software
    from phalanx.doctor.checks.deployment import Deployment, is_too_old, kernels

    visible = _visible(environ)
    count = len(facts.gpus) if visible is None else min(visible, len(facts.gpus))
    if tp > count:
        return Finding(
            "error", "too_few_gpus", "Fewer GPUs than ranks", f"TP={tp}, {count} visible", "", f"Use TP <= {count}"
        ), []
    if all(is_too_old(gpu) for gpu in facts.gpus):
        return kernels(facts, Deployment(tp=tp)), []
    cut = gpus.mig(facts)
    if tp > 1 and cut is not None and cut.level != "ok" and all(gpu.mig == "on" for gpu in facts.gpus):
        return cut, []
    checks = (
        gpus.mig,
        memory.ecc_errors,
        memory.remapped_rows,
        memory.gpu_memory,
        links.nvlinks,
        fabric.fabric_manager,
        fabric.fabric_state,
        power.throttle,
        software.driver_for_torch,
        *((links.topology,) if tp > 1 else ()),
    )
    said: list[Finding] = []
    for check in checks:
        found = check(facts)
        said += [found] if isinstance(found, Finding) else list(found or ())
    return None, [finding for finding in said if finding.level in ("error", "warning")]


def _may_see_gpus(environ: Mapping[str, str]) -> bool:
    return _visible(environ) != 0


def _visible(environ: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES leaves; None where it says nothing. CUDA stops reading at the first -1."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names = [name.strip() for name in given.split(",")]
    kept = names[: names.index("-1")] if "-1" in names else names
    return len([name for name in kept if name])


def _cheap_facts() -> Facts:
    """GPUs by NVML and the versions of packages: milliseconds, and nothing is started."""
    from phalanx.doctor.gather.host import Host
    from phalanx.doctor.gather.nvml import NvmlError, read_nvml
    from phalanx.doctor.gather.software import read_software

    now, system = datetime.now(UTC).isoformat(timespec="seconds"), System(hostname=socket.gethostname())
    try:
        found = read_nvml([])
    except NvmlError:
        return Facts(now, system, Software(python="", phalanx=__version__))
    software = read_software(Host(), found.driver, found.driver_cuda, 0)
    return Facts(now, system, software, found.gpus, found.paths)
