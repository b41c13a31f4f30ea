"""What tells collectives which network to use."""

from __future__ import annotations


def fabric_environment(interface: str, rdma: tuple[str, ...]) -> dict[str, str]:
    """Variables that keep collectives on the fast network. GID 3 is RoCE v2 over IPv4."""
    told = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    told |= {"UCX_NET_DEVICES": interface, "OMPI_MCA_btl_tcp_if_include": interface}
    if rdma:
        told |= {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": ",".join(rdma), "NCCL_IB_GID_INDEX": "3"}
    if len(rdma) > 1:
        told["NCCL_IB_SUBNET_AWARE_ROUTING"] = "1"
    return told
