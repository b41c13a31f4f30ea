"""Moments on a GPU: kernels write down the GPU's own clock, in ns, where somebody wants it.

A place has room for two: when a kernel begins, which is when the one ahead of it has ended, and, of a collective, when
it ends. The kernels that begin most parts of a step write to the place that is wanted, if one is; in front of others
goes a kernel that does nothing else.
"""

from __future__ import annotations

import threading

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead


class _Wanted(threading.local):
    """Of each thread: engines in others launch kernels too."""

    place: Tensor | None = None


_wanted = _Wanted()


def want(place: Tensor | None) -> None:
    """The kernel launched next is to write there: two int64 at an address that 16 divides, as that of every other
    place, else kernels would be built anew. None: nothing is wanted any more.
    """
    _wanted.place = place


def is_wanted() -> bool:
    """Whether no kernel has taken it yet."""
    return _wanted.place is not None


def taken() -> Tensor | None:
    """Where the kernel that is about to be launched writes to. One that is given None is built without all of this."""
    place = _wanted.place
    if place is not None:
        _wanted.place = None
    return place


def taken_by(kernels: int) -> list[tuple[Tensor | None, Tensor | None]]:
    """The same for several: where each writes to when it begins, and when it ends. All of them are one collective."""
    place = taken()
    ends = kernels - 1
    return [(place if each == 0 else None, place if each == ends else None) for each in range(kernels)]


@triton.jit
def stamp_begin(place):
    """Behind `wait_for_ahead`; best where loads are on their way already."""
    if place is not None:  # noqa: SIM102  (known when it is built)
        if tl.program_id(0) == 0:
            tl.store(place, cuda.globaltimer())


@triton.jit
def stamp_end(place):
    """When the first program has done its part: the others do as much."""
    if place is not None:
        tl.debug_barrier()
        if tl.program_id(0) == 0:
            tl.store(place + 1, cuda.globaltimer())


@triton.jit
def _stamp(place):
    let_next_start()
    wait_for_ahead()
    stamp_begin(place)


def stamp() -> None:
    """Write down now what is wanted: for moments behind which no kernel comes that can."""
    _stamp[(1,)](taken(), num_warps=1, launch_pdl=starts_early())
