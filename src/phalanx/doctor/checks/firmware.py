"""Firmware that should be the same on parts that are the same: cards, switches, network adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding


def firmware(facts: Facts) -> Iterator[Finding]:
    """Unlike versions among equals: half an update, or a part that was replaced."""
    cards = ((gpu.name, gpu.vbios, f"GPU {gpu.index}") for gpu in facts.gpus)
    switches = facts.fabric_manager.switch_firmware if facts.fabric_manager else ()
    bridges = (("NVSwitch", found, f"switch {place}") for place, found in enumerate(switches))
    ports = (("network adapters", nic.firmware, nic.rdma) for nic in facts.network.nics if nic.rdma)
    told = []
    for what, versions in _by_kind((*cards, *bridges, *ports)).items():
        if len(versions) > 1:
            listed = "; ".join(f"{found}: {', '.join(who)}" for found, who in sorted(versions.items()))
            yield Finding(
                "warning",
                "firmware",
                f"Unlike firmware on {what}",
                listed,
                "Parts of one group wait for each other; a half-made update is also how silent corruption begins.",
                "Update all by one bundle of the vendor (HGX: firmware and driver together; ConnectX: fwupdmgr or "
                "mlxfwmanager), then power cycle.",
            )
        else:
            told.append(f"{what} {next(iter(versions))}")
    if told:
        yield Finding("ok", "firmware", "Firmware", ", ".join(told))


def _by_kind(parts: Iterable[tuple[str, str | None, str]]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for what, firmware_found, who in parts:
        if firmware_found:
            found[what][firmware_found].append(who)
    return found
