"""NcclGroup: ranks with a GPU each, on one machine or several."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from phalanx.engine.whereabouts import ALL_REDUCE, GATHER
from phalanx.fabric.group import (
    CHECK_EVERY_S,
    COLLECTIVE_TIMEOUT,
    Check,
    FabricError,
    Group,
    nothing_to_say,
    poll,
    with_patience,
)


class NcclGroup(Group):
    """Collectives on the current stream. Not torch's default group. NCCL refuses two ranks on one GPU."""

    in_graphs = True
    seconds = 0.0

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.calls = 0
        self._check: Check = nothing_to_say
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False

    def connect(self, store: Store, host: str, check: Check = nothing_to_say) -> None:
        """Meet the other ranks, over the interface that has this address. Every rank must come.

        The communicator is made here and not by the first collective, which may be inside the capture of a graph.
        """
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
        self._check = check
        failed: list[RuntimeError] = []

        def meet() -> None:
            try:
                self._group = _process_group(PrefixStore("nccl", store), self.rank, self.size, COLLECTIVE_TIMEOUT)
                with torch.cuda.device(self.device):
                    self.all_reduce(torch.zeros(1, device=self.device))
                    torch.cuda.synchronize()
            except RuntimeError as error:
                failed.append(error)

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        while meeting.is_alive():
            meeting.join(CHECK_EVERY_S)
            if meeting.is_alive():
                check()
        if failed:
            raise FabricError(str(failed[0])) from failed[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.count(ALL_REDUCE)
        _join(self._group.allreduce([tensor], self._reduce))
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        rows, widest = tensor.shape[0], max(widths)
        padded = tensor.new_zeros(rows, widest)
        padded[:, : tensor.shape[1]] = tensor
        gathered = tensor.new_empty(self.size, rows, widest)
        self.count(GATHER)
        _join(self._group._allgather_base(gathered, padded, self._gather))
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)

    def wait_for(self, event: torch.cuda.Event) -> None:
        poll(event, self._check, self.where)

    def close(self) -> None:
        """Aborting ends collectives that wait for a rank that is gone."""
        group = self.__dict__.pop("_group", None)
        if group is not None:
            with_patience(group.abort)


def _join(work: dist.Work | None) -> None:
    """There is nothing to wait for where the collective was put on the current stream itself."""
    if work is not None:
        work.wait()


def _process_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def interface_of(host: str) -> str:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(at.family == socket.AF_INET and at.address == host for at in addresses):
            return name
    raise FabricError(f"no network interface of this machine has the address {host}")
