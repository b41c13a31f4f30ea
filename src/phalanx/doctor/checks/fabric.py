"""The NVSwitch fabric: the service that sets it up, and what it says of each GPU."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.checks.products import needs_switch, product, whose
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding

_RACK_SCALE = ("GB200", "GB300")
"""Their compute trays run no fabric manager: it is on the switch trays."""


def _has_switches(facts: Facts) -> bool:
    """Whether this board has NVSwitches: told so, or every pair shares all links of a GPU."""
    manager = facts.fabric_manager
    if manager is not None and manager.switches is not None:
        return manager.switches > 0
    for path in facts.paths:
        gpu = next((gpu for gpu in facts.gpus if gpu.index == path.a), None)
        known = product(gpu) if gpu else None
        if known and known.link.kind == "nvswitch" and len(facts.gpus) > 2 and path.links in known.nvlinks:
            return True
    return False


def fabric_manager(facts: Facts) -> Iterator[Finding]:
    """The service that sets up the switches; it must be of the driver's very version."""
    manager = facts.fabric_manager
    rack = any((known := product(gpu)) and known.name in _RACK_SCALE for gpu in facts.gpus)
    if manager is None or rack or not any(needs_switch(gpu) for gpu in facts.gpus):
        return
    driver = facts.software.driver
    install = f"Install nvidia-fabricmanager {driver or 'of the driver'} and start it: systemctl enable --now "
    if manager.running is False and _has_switches(facts):
        yield Finding(
            "error",
            "fabric_manager",
            "The fabric manager does not run",
            manager.problem or "nvidia-fabricmanager is not active",
            "Without it NVSwitch has no routes: CUDA fails with error 802 (system not yet initialized) or falls back "
            "to "
            "PCIe, while nvidia-smi looks healthy.",
            install + "nvidia-fabricmanager.",
        )
    elif manager.version and driver and manager.version != driver:
        yield Finding(
            "error",
            "fabric_manager",
            "Fabric manager and driver differ",
            f"fabric manager {manager.version}, driver {driver}",
            "It stops at its start unless both have the very same version; an upgrade of the driver alone breaks it.",
            install + "nvidia-fabricmanager.",
        )
    elif manager.running and manager.problem:
        yield Finding(
            "warning",
            "fabric_manager",
            "The fabric manager complains",
            manager.problem,
            "A partly set up fabric leaves GPUs without NVLink.",
            "journalctl -u nvidia-fabricmanager and /var/log/fabricmanager.log name the GPU or switch.",
        )
    elif manager.running:
        version = f" {manager.version}, as the driver" if manager.version and driver else ""
        yield Finding("ok", "fabric_manager", "Fabric manager", f"runs{version}")


def fabric_state(facts: Facts) -> Finding | None:
    """What the fabric itself says of each GPU."""
    told = [(gpu, gpu.fabric) for gpu in facts.gpus if gpu.fabric and gpu.fabric.state != "not-supported"]
    unready = [gpu for gpu, fabric in told if fabric.state != "completed"]
    failed = [gpu for gpu, fabric in told if fabric.status and fabric.status.lower() not in ("success", "ok", "n/a")]
    sick = [gpu for gpu, fabric in told if fabric.health == "unhealthy"]
    limited = [gpu for gpu, fabric in told if fabric.health == "limited"]
    if unready or failed or sick:
        words = [
            f"{whose(group)} {what}"
            for group, what in ((unready, "not registered"), (failed, "failed to register"), (sick, "unhealthy"))
            if group
        ]
        return Finding(
            "error",
            "fabric_state",
            "The NVSwitch fabric is not ready",
            "; ".join(words),
            "Such a GPU has no NVLink peers: CUDA waits, fails, or goes over PCIe.",
            "Check the fabric manager (its version must be the driver's), then reset the GPUs or reboot.",
        )
    if limited:
        return Finding(
            "warning",
            "fabric_state",
            "The fabric runs with limits",
            whose(limited),
            "A switch or links of it are out: less bandwidth than the board has.",
            "nvidia-smi -q shows the fabric's health; the board needs service.",
        )
    if told and len(told) == len(facts.gpus):
        return Finding("ok", "fabric_state", "Fabric", "every GPU is registered")
    return None
