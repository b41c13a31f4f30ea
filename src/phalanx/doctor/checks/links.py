"""How GPUs reach each other: NVLinks, the topology as a whole, peer access, and the switches' fabric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from phalanx.doctor.checks.products import is_geforce, needs_switch, product, which, whose
from phalanx.doctor.checks.toll import toll
from phalanx.doctor.facts import Facts, GpuFacts, GpuPath
from phalanx.doctor.finding import Finding, Level

WORST_LAST = ("self", "nvlink", "pix", "pxb", "phb", "node", "sys")
_PATHS = {
    "pix": "one PCIe switch",
    "pxb": "several PCIe switches",
    "phb": "the host bridge",
    "node": "host bridges of one NUMA node",
    "sys": "the link between sockets",
}
PairPaths = dict[tuple[int, int], GpuPath]


def _active(gpu: GpuFacts) -> int:
    return sum(link.active for link in gpu.links or ())


def nvlinks(facts: Facts) -> Iterator[Finding]:
    """Active links against what the product has when all is well. A card that takes a bridge may have none.

    MIG takes the links away; that has a finding of its own.
    """
    whole = [gpu for gpu in facts.gpus if gpu.links is not None and gpu.mig != "on"]
    told = [(gpu, known) for gpu in whole if (known := product(gpu)) and known.nvlinks]
    wrong = [
        (gpu, known)
        for gpu, known in told
        if _active(gpu) not in known.nvlinks and (_active(gpu) or (needs_switch(gpu) and len(facts.gpus) > 1))
    ]
    if wrong:
        counts = ", ".join(
            f"GPU {gpu.index}: {_active(gpu)} of {' or '.join(map(str, known.nvlinks))}" for gpu, known in wrong
        )
        on_board = any(needs_switch(gpu) for gpu, _ in wrong)
        yield Finding(
            "error" if on_board else "warning",
            "nvlinks",
            "NVLinks are down",
            f"{counts} active",
            "The fabric takes a GPU with a broken link out of peer access, or runs it at a part of its speed; every "
            "all-reduce waits for it."
            if on_board
            else "The bridge carries only a part of its bandwidth, and every all-reduce over it waits.",
            "Look for Xid 74 in dmesg and for SXid lines of the switches; reset GPUs and fabric manager, then power "
            "cycle. "
            "If a link stays down, the board needs service."
            if on_board
            else "Power down and reseat the bridge (all of them, where the card takes three).",
        )
    good = [gpu for gpu, known in told if _active(gpu) in known.nvlinks]
    if good and len(good) == len(facts.gpus):
        yield Finding("ok", "nvlinks", "NVLinks", f"{_active(good[0])} active on each GPU, as it should be")


def nvlink_errors(facts: Facts) -> Finding | None:
    """Replays, recoveries and CRC errors, and links that run slower than their neighbours."""
    active = [(gpu, link) for gpu in facts.gpus for link in gpu.links or () if link.active]
    erring = [(gpu, link) for gpu, link in active if link.errors]
    speeds = {link.gbs for _, link in active if link.gbs is not None}
    if erring:
        counts = ", ".join(f"GPU {gpu.index} link {link.link}: {link.errors}" for gpu, link in erring[:4])
        more = f" and {len(erring) - 4} more" if len(erring) > 4 else ""
        return Finding(
            "warning",
            "nvlink_errors",
            "NVLinks counted errors",
            counts + more,
            "Each is sent again, which delays the all-reduce; a link that errs often is about to go down.",
            "Clear them (nvidia-smi nvlink -re), put load on it, look again (nvidia-smi nvlink -e); if they grow, "
            "reseat or "
            "have it serviced.",
        )
    slow = [gpu for gpu, link in active if link.gbs is not None and link.gbs < 0.9 * max(speeds)]
    if slow and len({gpu.name for gpu, _ in active}) == 1:
        return Finding(
            "warning",
            "nvlink_errors",
            "NVLinks run at unlike speeds",
            f"{min(speeds):g} to {max(speeds):g} GB/s; slow ones on {whose(slow)}",
            "Every all-reduce goes at the speed of the slowest link.",
            "Reset the GPUs; if it stays, look at dmesg for Xid 74.",
        )
    if active and all(link.errors == 0 for _, link in active):
        return Finding("ok", "nvlink_errors", "NVLink errors", "none")
    return None


def pairs_of(facts: Facts) -> PairPaths:
    """Every pair that was told of, by its two indices in order; where two entries differ, the worse one."""
    pairs: PairPaths = {}
    for path in facts.paths:
        key = (min(path.a, path.b), max(path.a, path.b))
        if path.a != path.b and (key not in pairs or _badness(path) > _badness(pairs[key])):
            pairs[key] = path
    return pairs


def _badness(path: GpuPath) -> int:
    return WORST_LAST.index(path.kind)


def islands_of(facts: Facts) -> list[list[int]]:
    """Groups of GPUs that NVLink joins, each in order, the largest first."""
    group = {gpu.index: {gpu.index} for gpu in facts.gpus}
    for (a, b), path in pairs_of(facts).items():
        if path.kind == "nvlink" and a in group and b in group and group[a] is not group[b]:
            group[a] |= group[b]
            for member in group[b]:
                group[member] = group[a]
    distinct = {min(members): sorted(members) for members in group.values()}
    return sorted(distinct.values(), key=lambda members: (-len(members), members))


def topology(facts: Facts) -> Finding | None:
    """The matrix as a whole: NVLink everywhere, islands of it, or none. Cards that MIG cuts up are left out."""
    indices = [gpu.index for gpu in facts.gpus if gpu.mig != "on"]
    if len(indices) < 2:
        return None
    pairs = pairs_of(facts)
    wanted = list(combinations(sorted(indices), 2))
    if any(pair not in pairs for pair in wanted):
        return Finding(
            "note",
            "topology",
            "How the GPUs are joined is not known",
            f"{sum(pair in pairs for pair in wanted)} of {len(wanted)} pairs could be read",
            "",
            "nvidia-smi topo -m shows it.",
        )
    paths = [pairs[pair] for pair in wanted]
    islands = islands_of(facts)
    joined = [path for path in paths if path.kind == "nvlink"]
    if len(joined) == len(paths):
        counts = sorted({path.links for path in paths if path.links})
        links = f" (NV{counts[0]}{f' to NV{counts[-1]}' if len(counts) > 1 else ''})" if counts else ""
        return Finding("ok", "topology", "Topology", f"NVLink between all {len(indices)} GPUs{links}")
    worst = max((path for path in paths if path.kind != "nvlink"), key=_badness)
    if joined:
        return _islands(facts, islands, worst)
    return _no_nvlink(facts, worst)


def _islands(facts: Facts, islands: list[list[int]], worst: GpuPath) -> Finding:
    told = ", ".join("+".join(map(str, island)) for island in islands)
    found = f"islands {told}; between them {worst.kind.upper()}, {_PATHS[worst.kind]}"
    size = len(islands[0])
    if any(needs_switch(gpu) for gpu in facts.gpus):
        lost = [index for island in islands[1:] for index in island]
        return Finding(
            "error",
            "topology",
            "GPUs have lost NVLink",
            f"{which(lost)} reached over {worst.kind.upper()}; islands {told}" if lost else found,
            "On this board every GPU should reach every other by NVLink. " + toll(facts),
            "See the findings on fabric manager and NVLinks; a reset of all GPUs and the fabric manager brings it "
            "back, or "
            "the board needs service.",
        )
    if len(islands) == 1:
        found = f"NVLink joins GPUs {told} in a chain; other pairs go over {worst.kind.upper()}, {_PATHS[worst.kind]}"
    order = ",".join(str(index) for island in islands for index in island)
    return Finding(
        "warning",
        "topology",
        "NVLink joins only some of the GPUs",
        found,
        f"A tensor-parallel group across islands talks over PCIe. {toll(facts)}",
        f"Keep TP at {size} and run {len(facts.gpus) // size} replicas, one an island: CUDA_VISIBLE_DEVICES={order} "
        f"puts "
        "ranks of an island side by side."
        if size > 1 and len(islands) > 1
        else f"Keep a group inside a pair that NVLink joins: TP=2, CUDA_VISIBLE_DEVICES={order}.",
    )


def takes_bridges(facts: Facts) -> bool:
    """Whether two cards of one kind could be joined by a bridge."""
    kinds = Counter(known.name for gpu in facts.gpus if (known := product(gpu)) and known.nvlinks)
    return any(count > 1 for count in kinds.values())


def _no_nvlink(facts: Facts, worst: GpuPath) -> Finding:
    found = f"no NVLink; at worst {worst.kind.upper()}, {_PATHS[worst.kind]}"
    on_board = any(needs_switch(gpu) for gpu in facts.gpus)
    takes_bridge = takes_bridges(facts)
    level: Level = "error" if on_board else "warning" if takes_bridge else "note"
    if on_board:
        title = "NVLink does not work"
        fix = "Start the fabric manager of the driver's version, reset the GPUs, look at dmesg for Xid and SXid lines."
    elif takes_bridge:
        title = "Cards are not bridged"
        fix = "Put NVLink bridges on pairs and run TP=2 replicas, or use formats and models that fit fewer cards."
    else:
        title = "GPUs talk over PCIe"
        fix = "NVLink cannot join these cards. Prefer replicas to TP, and TP=2 to TP=4: phalanx plan compares them."
    if worst.kind == "sys" and not on_board:
        fix += " Keep a group on one socket: CUDA_VISIBLE_DEVICES by NUMA node."
    return Finding(level, "topology", title, found, toll(facts), fix)


def p2p(facts: Facts) -> Finding | None:
    """Whether cards may read each other's memory at all: a matrix of PHB does not say."""
    told = [path for path in pairs_of(facts).values() if path.p2p not in (None, "unknown")]
    barred = [path for path in told if path.p2p != "ok"]
    if not told:
        return None
    if not barred:
        return Finding("ok", "p2p", "Peer access", f"allowed between all {len(told)} pairs")
    reasons = ", ".join(sorted({str(path.p2p) for path in barred}))
    by_design = bool(facts.gpus) and all(is_geforce(gpu) for gpu in facts.gpus)
    switched_off = any(path.p2p == "disabled" for path in barred)
    return Finding(
        "note" if by_design and not switched_off else "warning",
        "p2p",
        "Cards cannot read each other's memory",
        f"{len(barred)} of {len(told)} pairs: {reasons}",
        "Collectives then copy through the host's memory (/dev/shm), at a fraction of PCIe's speed.",
        "NVIDIA's driver does not offer it on these cards: prefer replicas to TP."
        if by_design and not switched_off
        else "A setting of the driver forbids it (NVreg RMForceP2PType and the like): remove it."
        if switched_off
        else "Turn IOMMU and ACS off in the BIOS on bare metal, or place the cards below one PCIe switch; in a virtual "
        "machine pass them through with ACS redirection off.",
    )


def iommu(facts: Facts) -> Finding | None:
    """An IOMMU on the way of peer traffic over PCIe slows it, or breaks it."""
    over_pcie = [path for path in pairs_of(facts).values() if path.kind in ("pix", "pxb", "phb", "node", "sys")]
    if not facts.system.iommu or not any(path.p2p == "ok" for path in over_pcie):
        return None
    return Finding(
        "warning",
        "iommu",
        "The IOMMU is on, and GPUs talk over PCIe",
        f"{len(over_pcie)} pairs without NVLink",
        "It sends peer traffic through the root complex: slow, and on some boards NCCL hangs or reads wrong data.",
        "On bare metal: iommu=off (or pt) on the kernel's command line and ACS off in the BIOS; then phalanx doctor "
        "--measure checks sums and speed.",
    )
