"""Which group ranks talk in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from phalanx.errors import ConfigError
from phalanx.fabric import cuda_ipc
from phalanx.fabric.group import GlooGroup
from phalanx.fabric.host import HostGroup
from phalanx.fabric.nccl import NcclGroup
from phalanx.fabric.peer import PeerGroup
from phalanx.kernels import cpu

ProcessGroup = GlooGroup | HostGroup | NcclGroup | PeerGroup


def choose_group(
    rank: int,
    size: int,
    device: torch.device,
    gpus: Sequence[int] | None,
    linked: Callable[[int, int], bool] = cuda_ipc.linked,
) -> ProcessGroup:
    """On CPUs memory of one machine, else gloo; on GPUs peer memory where all ranks reach it, NCCL for the rest.

    `gpus` is the GPU of every rank if all are on this machine and seen by this process, else None. Every rank comes to
    the same answer.
    """
    if device.type == "cpu":
        return GlooGroup(rank, size) if gpus is None or cpu.library() is None else HostGroup(rank, size)
    if gpus is None:
        return NcclGroup(rank, size, device)
    from phalanx.kernels.gpu.all_reduce import MOST_RANKS

    reached = size <= MOST_RANKS and all(linked(*pair) for pair in permutations(sorted(set(gpus)), 2))
    if len(set(gpus)) < size:
        if not reached:
            raise ConfigError(
                "no_peer_memory",
                f"{size} ranks share {len(set(gpus))} GPUs, which do not all reach each other's memory.",
                f"Share one GPU, by at most {MOST_RANKS} ranks, or give every rank its own.",
            )
        return PeerGroup(rank, size, device, None)
    large = NcclGroup(rank, size, device)
    return PeerGroup(rank, size, device, large) if reached else large
