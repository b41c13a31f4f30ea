"""DGX Spark machines joined by their ConnectX-7 ports: names, addresses and settings, as files of their systems."""

from __future__ import annotations

INTERFACES = ("enp1s0f1np1", "enP2p1s0f1np1")
"""One QSFP port is two network devices: a cable's full speed takes both."""
RDMA = ("rocep1s0f1", "roceP2p1s0f1")
"""Their RoCE functions, in the same order."""
NETWORKS = ("192.168.100", "192.168.101")
"""A subnet each: in one subnet, routes are ambiguous and NCCL fails."""
NETPLAN = "40-cx7.yaml"
SYSCTL = "90-cx7.conf"
LIMITS = "90-memlock.conf"
_FIRST_ADDRESS = 10
_MTU = 9000


def address(node: int, function: int = 0) -> str:
    """Of machine `node`, counted from 0."""
    return f"{NETWORKS[function]}.{_FIRST_ADDRESS + node}"


def netplan(node: int) -> str:
    """Both functions of machine `node`, each in its own subnet, with jumbo frames."""
    lines = "".join(
        f"    {name}: {{dhcp4: false, mtu: {_MTU}, addresses: [{address(node, function)}/24]}}\n"
        for function, name in enumerate(INTERFACES)
    )
    return (
        f"# /etc/netplan/{NETPLAN} on machine {node}, mode 600. Then: sudo netplan apply\n"
        f"network:\n  version: 2\n  ethernets:\n{lines}"
    )


def system_files() -> dict[str, str]:
    """The same on every machine: /etc/sysctl.d and /etc/security/limits.d."""
    return {
        SYSCTL: (
            "# /etc/sysctl.d: buffers for 200 Gb/s; both functions share a wire, so each answers for its own address\n"
            "net.core.rmem_max = 268435456\nnet.core.wmem_max = 268435456\n"
            "net.ipv4.tcp_rmem = 4096 87380 134217728\nnet.ipv4.tcp_wmem = 4096 65536 134217728\n"
            "net.ipv4.conf.all.arp_ignore = 1\nnet.ipv4.conf.all.arp_announce = 2\n"
            "# the GPU's memory is the system's: do not swap it\nvm.swappiness = 1\n"
        ),
        LIMITS: "# /etc/security/limits.d: RDMA pins its buffers\n* - memlock unlimited\n",
    }
