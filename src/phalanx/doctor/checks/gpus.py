"""The cards themselves: which they are, and whether they are sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phalanx.doctor.checks.products import product, which, whose
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding

HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP firmware time-out",
    120: "GSP firmware error",
}
"""Those of NVIDIA's Xid list that name the card, its memory or its firmware; the others are mostly a program's."""


def names(facts: Facts) -> Iterator[Finding]:
    """What is there; cards that differ, and cards nobody has described."""
    if not facts.gpus:
        return
    counts = Counter(gpu.name for gpu in facts.gpus)
    found = ", ".join(f"{count} x {name}" for name, count in counts.items())
    if len(counts) > 1:
        yield Finding(
            "warning",
            "gpu_names",
            "Cards differ",
            found,
            "Tensor-parallel ranks do equal work: the smallest memory and the slowest card bound all of them.",
            "Give each kind of card a replica of its own (CUDA_VISIBLE_DEVICES), or plan for the weakest: "
            f"phalanx plan MODEL --machine {_plan_name(facts, counts)}",
        )
    else:
        yield Finding("ok", "gpu_names", "GPUs", found)
    strangers = [gpu for gpu in facts.gpus if product(gpu) is None]
    if strangers:
        yield Finding(
            "note",
            "gpu_unknown",
            "A card the catalogue does not have",
            f"{whose(strangers)}: {', '.join(dict.fromkeys(gpu.name for gpu in strangers))}",
            "How many NVLinks it should have, and how fast it should be, is not judged.",
            "Add it to gpus.toml, from its data sheet.",
        )


def _plan_name(facts: Facts, counts: Counter[str]) -> str:
    """As `phalanx plan --machine` wants it, where it knows the cards."""
    known = {gpu.name: found.name for gpu in facts.gpus if (found := product(gpu))}
    return "+".join(f"{count}x{known.get(name, name)}" for name, count in counts.items())


def lost_gpus(facts: Facts) -> Finding | None:
    """Cards that the driver counts, and cannot open."""
    if not facts.lost_gpus:
        return None
    return Finding(
        "error",
        "lost_gpus",
        "A GPU is lost",
        f"{which(facts.lost_gpus)}: the driver counts it, and it does not answer",
        "It has fallen off the bus, or another program has it for itself; CUDA may not start at all.",
        "dmesg | grep Xid (79: off the bus); power cycle the machine, reseat the card or its cable.",
    )


def mig(facts: Facts) -> Finding | None:
    """Slices of a card cannot be ranks of one model."""
    cut = [gpu for gpu in facts.gpus if gpu.mig == "on"]
    if cut:
        return Finding(
            "error" if len(facts.gpus) > 1 else "warning",
            "mig",
            "MIG is on",
            f"{whose(cut)} of {len(facts.gpus)} partitioned",
            "Slices have neither NVLink nor peer access, so tensor parallelism cannot use them; a slice alone has a "
            "part "
            "of the card's memory and speed.",
            f"nvidia-smi -mig 0 -i {','.join(str(gpu.index) for gpu in cut)}, once nothing runs on them; then reset or "
            "reboot.",
        )
    if facts.gpus and all(gpu.mig == "off" for gpu in facts.gpus):
        return Finding("ok", "mig", "MIG", "off")
    return None


def xids(facts: Facts) -> Finding | None:
    """What the driver wrote into the kernel's log."""
    if facts.system.xids is None or not facts.gpus:
        return None
    seen = Counter(facts.system.xids)
    if not seen:
        return Finding("ok", "xid", "Xid errors", "none in the kernel's log")
    hardware = {xid: count for xid, count in seen.items() if xid in HARDWARE_XIDS}
    told = hardware or seen
    return Finding(
        "error" if hardware else "note",
        "xid",
        "The driver reported hardware errors" if hardware else "The driver reported errors",
        ", ".join(f"Xid {xid} x {count} ({HARDWARE_XIDS.get(xid, 'mostly a program')})" for xid, count in told.items()),
        "Such a card fails again, and takes the whole tensor-parallel group with it." if hardware else "",
        "dmesg | grep Xid names the card; run dcgmi diag -r 3 on it, reset it, and have it replaced if it recurs."
        if hardware
        else "dmesg | grep Xid has the times; look for the program that ran then.",
    )


def pcie_width(facts: Facts) -> Finding | None:
    """Lanes, which do not change with load as the generation does. A GB10 has no slot."""
    told = [gpu for gpu in facts.gpus if not gpu.unified and gpu.pcie_width and gpu.pcie_width_max]
    narrow = [gpu for gpu in told if (gpu.pcie_width or 0) < (gpu.pcie_width_max or 0)]
    if narrow:
        return Finding(
            "warning",
            "pcie_width",
            "PCIe link is narrower than the card",
            ", ".join(f"GPU {gpu.index}: x{gpu.pcie_width} of x{gpu.pcie_width_max}" for gpu in narrow),
            "Weights load more slowly, and where there is no NVLink every all-reduce takes that much longer.",
            "Reseat the card and check the slot's lanes, risers and the BIOS's bifurcation.",
        )
    if told and len(told) == len(facts.gpus):
        return Finding("ok", "pcie_width", "PCIe width", f"x{min(gpu.pcie_width or 0 for gpu in told)}")
    return None


def persistence(facts: Facts) -> Finding | None:
    """Without it the driver lets go of an idle card."""
    off = [gpu for gpu in facts.gpus if gpu.persistence is False]
    if off:
        return Finding(
            "note",
            "persistence",
            "Persistence mode is off",
            whose(off),
            "The driver starts the cards anew for every first program, which takes seconds, and forgets power limits.",
            "systemctl enable --now nvidia-persistenced",
        )
    if facts.gpus and all(gpu.persistence for gpu in facts.gpus):
        return Finding("ok", "persistence", "Persistence mode", "on")
    return None
