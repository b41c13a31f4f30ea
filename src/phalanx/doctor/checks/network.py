"""The network between machines: speed, frames, RoCE functions, and which port the libraries were told to use."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from phalanx.doctor.checks.products import is_spark
from phalanx.doctor.facts import Facts, Nic
from phalanx.doctor.finding import Finding

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_JUMBO = 9000
_SPARK_MBPS = 200_000
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def fast_ports(facts: Facts) -> list[Nic]:
    """Interfaces with RDMA that are up."""
    return [nic for nic in facts.network.nics if nic.rdma and nic.up]


def subnets_of(nic: Nic) -> list[Network]:
    """The IPv4 networks of an interface; what cannot be read is left out."""
    found: list[Network] = []
    for address in nic.addresses:
        try:
            interface = ipaddress.ip_interface(address)
        except ValueError:
            continue
        if interface.version == 4 and not interface.is_link_local and not interface.is_loopback:
            found.append(interface.network)
    return found


def link_speed(facts: Facts) -> Finding | None:
    """Ports that came up slower than they can."""
    told = [(nic, nic.speed_mbps) for nic in fast_ports(facts) if nic.speed_mbps]
    if not told:
        return None
    wanted = _SPARK_MBPS if is_spark(facts) else max(speed for _, speed in told)
    slow = [(nic, speed) for nic, speed in told if speed < wanted]
    if slow:
        return Finding(
            "warning",
            "link_speed",
            "A fast port runs slow",
            ", ".join(f"{nic.name}: {speed // 1000} of {wanted // 1000} Gb/s" for nic, speed in slow),
            "Every all-reduce between machines passes it.",
            "Check cable and switch port; switches often settle on 100G: set 200G-baseCR4 and autonegotiation off "
            "there.",
        )
    return Finding(
        "ok", "link_speed", "Fast ports", ", ".join(f"{nic.name}: {speed // 1000} Gb/s" for nic, speed in told)
    )


def mtu(facts: Facts) -> Finding | None:
    """Frames of 9000 bytes on the fast ports."""
    told = [(nic, nic.mtu) for nic in fast_ports(facts) if nic.mtu]
    small = [(nic, size) for nic, size in told if size < _JUMBO]
    if small:
        roce = sorted({nic.rdma_mtu for nic, _ in small if nic.rdma_mtu})
        return Finding(
            "warning",
            "mtu",
            "Fast ports use small frames",
            ", ".join(f"{nic.name}: {size}" for nic, size in small)
            + (f"; RoCE then sends {roce[0]} bytes at a time" if roce else ""),
            "More packets for the same bytes: less bandwidth in prefill.",
            "mtu: 9000 in netplan on every machine, and at least that on the switch's ports.",
        )
    return Finding("ok", "mtu", "MTU", f"{min(size for _, size in told)} on fast ports") if told else None


def jumbo(facts: Facts) -> Finding | None:
    """Whether large frames come through to the peers, whole."""
    tried = facts.network.jumbo_to
    lost = [peer for peer, whole in tried.items() if not whole]
    if lost:
        meant = any((nic.mtu or 0) >= _JUMBO for nic in facts.network.nics)
        return Finding(
            "error" if meant else "warning",
            "jumbo",
            "Large frames do not come through",
            f"9000 bytes to {', '.join(lost)}",
            "This side sends frames that something on the way drops: small messages work, large ones hang until they "
            "time "
            "out."
            if meant
            else "Some port on the way, or this one, has a small MTU.",
            "Set MTU 9000 on every port of the path, the switch's included; ping -M do -s 8972 PEER shows it.",
        )
    return Finding("ok", "jumbo", "Large frames", f"reach {', '.join(tried)}") if tried else None


def _root(nic: Nic) -> str:
    """A Spark's port shows as two functions: enp1s0f1np1 and enP2p1s0f1np1 are the port f1."""
    return nic.name[nic.name.rfind("f") :] if "f" in nic.name else nic.name


def roce_functions(facts: Facts) -> Iterator[Finding]:
    """A Spark reaches full speed only over both functions of a port, each with an address in a subnet of its own."""
    if not is_spark(facts):
        return
    ports: dict[str, list[Nic]] = defaultdict(list)
    for nic in fast_ports(facts):
        ports[_root(nic)].append(nic)
    used = {port: nics for port, nics in ports.items() if any(subnets_of(nic) for nic in nics)}
    bare = [nic for nics in used.values() for nic in nics if not subnets_of(nic)]
    alone = [nics[0] for nics in used.values() if len(nics) == 1]
    if bare or alone:
        names = ", ".join(nic.name for nic in bare) or f"the second function beside {alone[0].name}"
        yield Finding(
            "warning",
            "roce_functions",
            "Only one function of the port has an address",
            f"none on {names}",
            "One function carries 92 to 97 of the port's 200 Gb/s: each is one of two PCIe links to the adapter.",
            "Give both functions an address in netplan, in different subnets, and name both in NCCL_IB_HCA.",
        )
    shared = _shared_subnets(facts)
    if shared:
        network, nics = next(iter(shared.items()))
        yield Finding(
            "warning",
            "roce_subnets",
            "Two functions are in one subnet",
            f"{' and '.join(nic.name for nic in nics)} in {network}",
            "The kernel sends both through one of them, and the peer's answers arrive at the other: NCCL fails or "
            "hangs.",
            "Use one /24 for each function, such as 192.168.100.x and 192.168.101.x, the same pair on every machine.",
        )
    if used and not (bare or alone or shared):
        told = ", ".join(f"{nic.name} {subnets_of(nic)[0]}" for nics in used.values() for nic in nics)
        yield Finding("ok", "roce_functions", "RoCE functions", told)


def _shared_subnets(facts: Facts) -> dict[Network, list[Nic]]:
    holders: dict[Network, list[Nic]] = defaultdict(list)
    for nic in fast_ports(facts):
        for network in dict.fromkeys(subnets_of(nic)):
            holders[network].append(nic)
    return {network: nics for network, nics in holders.items() if len(nics) > 1}


def names_interface(rule: str, name: str) -> bool:
    """NCCL's rule: prefixes with commas; `=` before them wants the whole name, `^` all but these."""
    inverted, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = [word for word in rule.split(",") if word]
    matched = any(name == word if exact else name.startswith(word) for word in words)
    return matched != inverted


def socket_interface(facts: Facts) -> Iterator[Finding]:
    """Whether NCCL and gloo were told to meet on a fast port."""
    fast, nics = fast_ports(facts), facts.network.nics
    addressed = [nic for nic in fast if subnets_of(nic)]
    for variable in _INTERFACE_VARIABLES:
        rule = facts.network.environment.get(variable, "")
        if not rule or not nics:
            continue
        chosen = [nic for nic in nics if names_interface(rule, nic.name)]
        if not any(nic.up for nic in chosen):
            yield Finding(
                "error",
                "socket_interface",
                f"{variable} names no interface that is up",
                f"{variable}={rule}; there are {', '.join(nic.name for nic in nics if nic.up) or 'none up'}",
                "Ranks cannot meet: they fail at the start, or wait until they time out.",
                f"Set it to {addressed[0].name if addressed else 'an interface that is up'} on this machine.",
            )
        elif addressed and not any(nic in fast for nic in chosen if nic.up):
            yield Finding(
                "warning",
                "socket_interface",
                f"{variable} names a slow port",
                f"{variable}={rule}, while {addressed[0].name} has RDMA",
                "What does not go by RDMA goes over that port.",
                f"Set it to {addressed[0].name}.",
            )
    unset = [variable for variable in _INTERFACE_VARIABLES if not facts.network.environment.get(variable)]
    if unset and is_spark(facts) and addressed:
        yield Finding(
            "note",
            "socket_interface",
            "Which port ranks meet on is not set",
            f"{' and '.join(unset)} not set; the fast port is {addressed[0].name}",
            "Between machines NCCL and gloo may choose the 10 Gb/s port or docker's bridge.",
            " ".join(f"{variable}={addressed[0].name}" for variable in unset),
        )


def rdma_devices(facts: Facts) -> Iterator[Finding]:
    """Whether NCCL was told to use the RDMA devices that there are."""
    fast, environment = fast_ports(facts), facts.network.environment
    if not fast:
        return
    devices = [nic.rdma for nic in fast if nic.rdma]
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        yield Finding(
            "warning",
            "rdma_devices",
            "RDMA is switched off",
            f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']}, with {', '.join(devices)} up",
            "Collectives between machines go through sockets: many times the latency.",
            "Unset NCCL_IB_DISABLE.",
        )
    rule = environment.get("NCCL_IB_HCA", "")
    if not rule:
        return
    plain = _without_ports(rule)
    chosen = [device for device in devices if names_interface(plain, device)]
    if not chosen:
        yield Finding(
            "error",
            "rdma_devices",
            "NCCL_IB_HCA names no device that is up",
            f"NCCL_IB_HCA={rule}; there are {', '.join(devices)}",
            "NCCL finds no adapter and falls back to sockets, or fails.",
            f"NCCL_IB_HCA={','.join(devices)}",
        )
    elif is_spark(facts) and len(chosen) < len(devices):
        yield Finding(
            "warning",
            "rdma_devices",
            "NCCL_IB_HCA leaves a function out",
            f"NCCL_IB_HCA={rule}; there are {', '.join(devices)}",
            "One function carries half of the port's speed.",
            f"NCCL_IB_HCA={','.join(devices)}",
        )


def _without_ports(rule: str) -> str:
    """mlx5_0:1 is the device mlx5_0."""
    return ",".join(word.partition(":")[0] for word in rule.split(","))


def p2p_switched_off(facts: Facts) -> Finding | None:
    """A workaround that outlived its reason."""
    value = facts.network.environment.get("NCCL_P2P_DISABLE", "0")
    joined = any(path.kind == "nvlink" for path in facts.paths)
    if value in ("", "0") or not joined:
        return None
    return Finding(
        "warning",
        "p2p_switched_off",
        "NVLink is there, but NCCL may not use it",
        f"NCCL_P2P_DISABLE={value}",
        "Collectives go through the host's memory.",
        "Unset NCCL_P2P_DISABLE.",
    )
