"""Machines that are to work together: what must be the same on all, and what must not."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.doctor.checks.network import Network, fast_ports, subnets_of
from phalanx.doctor.checks.software import version
from phalanx.doctor.facts import Facts, Nic
from phalanx.doctor.finding import Finding, Level

_SAME: tuple[tuple[str, Level, Callable[[Facts], str | None]], ...] = (
    ("phalanx", "error", lambda facts: facts.software.phalanx),
    ("torch", "error", lambda facts: facts.software.torch),
    ("NCCL", "error", lambda facts: facts.software.nccl),
    ("Ray", "error", lambda facts: facts.software.ray),
    ("Python", "error", lambda facts: ".".join(map(str, version(facts.software.python)[:2])) or None),
    ("driver", "warning", lambda facts: facts.software.driver),
    ("kernel", "note", lambda facts: facts.system.kernel),
)
"""What is compared, and how bad it is when it differs. Ray refuses nodes of another Ray or Python of its own accord."""
_BRIDGES = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")


def versions(machines: Sequence[Facts]) -> Iterator[Finding]:
    """The same software everywhere."""
    same = []
    for name, level, read in _SAME:
        told = {facts.system.hostname: found for facts in machines if (found := read(facts))}
        if len(set(told.values())) > 1:
            yield Finding(
                level,
                "versions",
                f"{name} differs between machines",
                ", ".join(f"{host}: {found}" for host, found in told.items()),
                "Ranks with unlike libraries disagree on messages or on numbers: hangs, time-outs, other tokens.",
                f"Install the same {name} on all of them; one container image everywhere is the surest way.",
            )
        elif len(told) == len(machines):
            same.append(f"{name} {next(iter(told.values()))}")
    if same:
        yield Finding("ok", "versions", "Versions", f"the same everywhere: {', '.join(same)}")


def hostnames(machines: Sequence[Facts]) -> Finding | None:
    names = [facts.system.hostname for facts in machines]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not twice:
        return None
    return Finding(
        "error",
        "hostnames",
        "Machines share a name",
        ", ".join(twice),
        "Ray and NCCL tell machines apart by name and address; or one machine was given twice.",
        "hostnamectl set-hostname; check the files given with --facts.",
    )


def addresses(machines: Sequence[Facts]) -> Finding | None:
    """No address twice. Bridges of containers have the same one everywhere, and that is fine."""
    holders: dict[str, list[str]] = defaultdict(list)
    for facts in machines:
        mine = {address.partition("/")[0] for nic in _real(facts) for address in nic.addresses}
        for address in sorted(mine):
            if not _is_local(address):
                holders[address].append(facts.system.hostname)
    twice = {address: hosts for address, hosts in holders.items() if len(hosts) > 1}
    if not twice:
        return Finding("ok", "addresses", "Addresses", "every one is unique") if holders else None
    return Finding(
        "error",
        "addresses",
        "Machines share an address",
        ", ".join(f"{address} on {' and '.join(hosts)}" for address, hosts in twice.items()),
        "Packets reach one of them at random; Ray stops with 'every node should have a unique IP address'.",
        "Give each machine addresses of its own in netplan.",
    )


def _real(facts: Facts) -> list[Nic]:
    return [nic for nic in facts.network.nics if not nic.name.startswith(_BRIDGES)]


def _is_local(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return True
    return found.is_loopback or found.is_link_local


def subnets(machines: Sequence[Facts]) -> Finding | None:
    """The fast ports of all machines must meet in the same subnets."""
    by_host: dict[str, set[Network]] = {}
    for facts in machines:
        found = {network for nic in fast_ports(facts) for network in subnets_of(nic)}
        if found:
            by_host[facts.system.hostname] = found
    if len(by_host) < 2:
        return None
    common = set.intersection(*by_host.values())
    union = set.union(*by_host.values())
    told = "; ".join(f"{host}: {_spelled(networks)}" for host, networks in by_host.items())
    if common == union:
        return Finding("ok", "subnets", "Subnets of the fast ports", _spelled(common))
    return Finding(
        "warning" if common else "error",
        "subnets",
        "Fast ports share only some subnets" if common else "Fast ports are in different subnets",
        told,
        "Ports that do not meet cannot carry a collective: half the speed at best, no connection at worst.",
        "Give the same function the same subnet on every machine, such as 192.168.100.x for the first and "
        "192.168.101.x "
        "for the second.",
    )


def _spelled(networks: set[Network]) -> str:
    return ", ".join(sorted(map(str, networks)))


def same_gpus(machines: Sequence[Facts]) -> Finding | None:
    """Ranks do equal work, so cards should be equal."""
    cards: Mapping[str, str] = {
        facts.system.hostname: ", ".join(sorted({gpu.name for gpu in facts.gpus})) for facts in machines if facts.gpus
    }
    if len(set(cards.values())) < 2:
        return None
    return Finding(
        "warning",
        "same_gpus",
        "Machines have different cards",
        "; ".join(f"{host}: {names}" for host, names in cards.items()),
        "All ranks go at the pace, and have the room, of the weakest.",
        "Keep a tensor-parallel group on machines of one kind.",
    )


def same_mtu(machines: Sequence[Facts]) -> Finding | None:
    sizes = {
        facts.system.hostname: min(mtus)
        for facts in machines
        if (mtus := [nic.mtu for nic in fast_ports(facts) if nic.mtu])
    }
    if len(set(sizes.values())) < 2:
        return None
    return Finding(
        "error",
        "same_mtu",
        "Frame sizes differ between machines",
        ", ".join(f"{host}: {size}" for host, size in sizes.items()),
        "The one with the smaller size drops what the other sends whole: large messages hang.",
        "Set the same MTU on all of them, 9000 where the switch allows it.",
    )
