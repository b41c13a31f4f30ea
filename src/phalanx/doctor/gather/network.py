"""Network interfaces with their RDMA devices, and the variables by which NCCL, gloo and Ray choose among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from phalanx.doctor.facts import NetworkFacts, Nic
from phalanx.doctor.gather.host import CommandError, Host
from phalanx.doctor.gather.smi.text import ParseError

_VARIABLES = {
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_MCA_btl_tcp_if_include",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_memory_monitor_refresh_ms",
    "TP_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "VLLM_HOST_IP",
}
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)
_RDMA_LINE = re.compile(r"(\S+) port (\d+) ==> (\S+) \((Up|Down)\)")
_PEER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_JUMBO_PAYLOAD, _JUMBO_PAYLOAD_IPV6 = 8972, 8952
"""What fits into 9000 bytes beside the headers of IP and ICMP."""
_PING_SECONDS = 5.0


def read_network(host: Host, peers: Iterable[str] = ()) -> NetworkFacts:
    """`peers` are tried with frames of 9000 bytes."""
    return NetworkFacts(_nics(host), recorded_environment(host.environ), _jumbo(host, peers))


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose devices and networks, and no other: others may be secrets."""
    chosen = (name for name in environ if name in _VARIABLES or name.startswith("NCCL_"))
    return {name: environ[name] for name in sorted(chosen) if not _SECRET.search(name)}


def _nics(host: Host) -> tuple[Nic, ...]:
    names = [name for name in host.entries("/sys/class/net") or () if name != "lo"]
    if not names:
        return ()
    addresses = _addresses(host)
    rdma = _rdma_devices(host)
    mtus = _rdma_mtus(host) if rdma else {}
    nics = []
    for name in names:
        folder = f"/sys/class/net/{name}"
        speed, device = host.number(f"{folder}/speed"), rdma.get(name)
        state = host.text(f"{folder}/operstate")
        if state is None:
            continue
        nics.append(
            Nic(
                name=name,
                up=state == "up" or (state == "unknown" and host.text(f"{folder}/carrier") == "1"),
                speed_mbps=speed if speed and speed > 0 else None,
                mtu=host.number(f"{folder}/mtu"),
                addresses=addresses.get(name, ()),
                rdma=device,
                rdma_mtu=mtus.get(device) if device else None,
                firmware=host.text(f"/sys/class/infiniband/{device}/fw_ver") if device else None,
            )
        )
    return tuple(nics)


class _Address(Struct):
    family: str = ""
    local: str = ""
    prefixlen: int = -1


class _Interface(Struct):
    ifname: str = ""
    addr_info: list[_Address] = []


def parse_addresses(text: str) -> dict[str, tuple[str, ...]]:
    """Reads `ip -json addr`: addresses by interface. Those that IPv6 gives every interface are left out."""
    try:
        interfaces = msgspec.json.decode(text, type=list[_Interface])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ParseError("ip -json addr", str(error)) from None
    return {
        interface.ifname: tuple(
            f"{address.local}/{address.prefixlen}"
            for address in interface.addr_info
            if address.local and address.prefixlen >= 0 and not address.local.lower().startswith("fe80:")
        )
        for interface in interfaces
    }


def _addresses(host: Host) -> dict[str, tuple[str, ...]]:
    try:
        return parse_addresses(host.command("ip", "-json", "addr"))
    except (CommandError, ParseError) as error:
        host.unread.append(f"Addresses of network interfaces cannot be told: {error.found}")
        return {}


def _rdma_devices(host: Host) -> dict[str, str]:
    """RDMA device by interface, from the kernel or else from NVIDIA's script."""
    devices = host.entries("/sys/class/infiniband") or ()
    found = {
        interface: device
        for device in devices
        for interface in host.entries(f"/sys/class/infiniband/{device}/device/net") or ()
    }
    if found or not devices:
        return found
    try:
        return parse_ibdev2netdev(host.command("ibdev2netdev"))
    except (CommandError, ParseError) as error:
        host.unread.append(f"Which interface each RDMA device belongs to cannot be told: {error.found}")
        return {}


def parse_ibdev2netdev(text: str) -> dict[str, str]:
    """Reads lines such as `rocep1s0f0 port 1 ==> enp1s0f0np0 (Up)`: RDMA device by interface."""
    found = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        match = _RDMA_LINE.fullmatch(line.strip())
        if match is None or match[3] in found:
            raise ParseError("ibdev2netdev", f"it has the line {line.strip()[:60]!r}")
        found[match[3]] = match[1]
    return found


def parse_devinfo(text: str) -> dict[str, int]:
    """Reads `ibv_devinfo`: the MTU that each RDMA device uses, of several ports the least."""
    found: dict[str, int] = {}
    device = None
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "hca_id":
            device = value
        elif name == "active_mtu":
            mtu = re.match(r"(\d{3,5}) ", value)
            if device is None or mtu is None:
                raise ParseError("ibv_devinfo", f"it has the line {line.strip()[:60]!r}")
            found[device] = min(found.get(device, int(mtu[1])), int(mtu[1]))
    return found


def _rdma_mtus(host: Host) -> dict[str, int]:
    try:
        return parse_devinfo(host.command("ibv_devinfo"))
    except (CommandError, ParseError) as error:
        host.unread.append(f"The MTU of RDMA devices cannot be told: {error.found}")
        return {}


def _jumbo(host: Host, peers: Iterable[str]) -> dict[str, bool]:
    found = {}
    for peer in peers:
        whole = _takes_jumbo(host, peer)
        if whole is not None:
            found[peer] = whole
    return found


def _takes_jumbo(host: Host, peer: str) -> bool | None:
    """Whether 9000 bytes reach the peer uncut; `None` where not even a short ping does."""
    if not _PEER.fullmatch(peer):
        host.unread.append(f"{peer!r} is no name or address of a machine.")
        return None
    payload = _JUMBO_PAYLOAD_IPV6 if ":" in peer else _JUMBO_PAYLOAD
    try:
        host.command("ping", "-c", "2", "-W", "2", "-M", "do", "-s", str(payload), peer, seconds=_PING_SECONDS)
        return True
    except CommandError as error:
        if re.search(r"option|usage", error.output, re.IGNORECASE):
            host.unread.append(f"Frames of 9000 bytes to {peer} cannot be tried: {error.found}")
            return None
    try:
        host.command("ping", "-c", "2", "-W", "2", peer, seconds=_PING_SECONDS)
        return False
    except CommandError as error:
        host.unread.append(f"{peer} does not answer: {error.found}")
        return None
