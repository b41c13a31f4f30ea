"""Which cores a rank's threads compute on."""

from __future__ import annotations

import os

import torch

from phalanx.kernels import cpu


def use_cores(ranks_here: int) -> None:
    """Threads as OMP_NUM_THREADS says, or this rank's share of the cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    torch.set_num_threads(int(given) if given.isdigit() and int(given) else share)


def keep_to_own_cores() -> None:
    """For a process that only computes, and with a thread for every core: each thread stays on a core of its own.

    In a step they wait for each other hundreds of times, and do not sleep meanwhile. Where other processes are busy
    too, a scheduler puts two of them on one core for seconds: each then waits, at work, for the other to have a turn.
    Threads that this one starts later stay on its core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if 1 < torch.get_num_threads() == len(cores) and cpu.library() is not None:
        cpu.call("own_cores", torch.tensor(cores), len(cores))
