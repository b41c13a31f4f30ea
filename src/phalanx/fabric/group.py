"""Groups of ranks and the two collectives a step needs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from phalanx.engine.marks import LinkPace
from phalanx.engine.whereabouts import ALL_REDUCE, FOR_DEVICE, GATHER, IN_CALL, Whereabouts
from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.norm import add_rms_norm_in

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_WAIT_SLICE = timedelta(seconds=1)
_CLOSE_WAIT_S = 1.0
_POLL_EVERY_S = 20e-6
CHECK_EVERY_S = 0.2

Check = Callable[[], None]
"""Called now and then while a rank waits for others: raises if that is in vain."""


class FabricError(RuntimeError):
    """A collective failed: some peer is gone. The peer's own report says why."""


class Group(Protocol):
    """One rank's view of all. What has a body here is right for every group; one that knows better has its own."""

    rank: int
    size: int
    seconds: float
    """Spent in collectives so far, by the host's clock."""
    calls: int
    """Collectives begun so far: ranks that have begun as many are in step."""
    where: Whereabouts = Whereabouts()
    """This rank's page. Nobody reads this one: ranks that others watch get one of their own."""
    in_graphs: bool
    """Whether its collectives may be captured in a CUDA graph."""
    pace: LinkPace | None = None
    """What they took when the ranks had just met, where these are on several machines."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank."""
        ...

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Every rank's columns side by side in rank order; rank r brings `widths[r]` of them."""
        ...

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Form) -> Activations:
        """RMSNorm of residual + the sum of x over ranks, which is kept in `residual`. x is used up."""
        return add_rms_norm_in(form, self.all_reduce(x), residual, weight, eps)

    def count(self, kind: int) -> None:
        """A collective begins."""
        self.calls += 1
        self.where.call(kind, self.calls)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Until the device has come to this event. FabricError if a rank is gone, so that it never will."""
        event.synchronize()

    def close(self) -> None: ...


class Solo(Group):
    """The group of one."""

    rank = 0
    size = 1
    seconds = 0.0
    calls = 0
    in_graphs = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return tensor

    def close(self) -> None:
        return None


def serve_store(host: str) -> tuple[Store, str]:
    """A store on a free port of this address alone, and where others find it."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"tcp://{host}:{port}"


def open_store(address: str, size: int) -> Store:
    """The store at `tcp://HOST:PORT`, or in a file that all ranks can open."""
    if not address.startswith("tcp://"):
        store = dist.FileStore(address, size)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        return store
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise FabricError(str(error)) from error


def nothing_to_say() -> None:
    return None


def poll(event: torch.cuda.Event, check: Check, where: Whereabouts) -> None:
    """Wait for an event that may never come. A device that failed may have failed because a rank is gone."""
    where.wait(FOR_DEVICE)
    checked = time.monotonic()
    while True:
        try:
            if event.query():
                where.wait(0)
                return
        except RuntimeError:
            check()
            raise
        time.sleep(_POLL_EVERY_S)
        if time.monotonic() - checked > CHECK_EVERY_S:
            check()
            checked = time.monotonic()


def with_patience(work: Callable[[], None]) -> None:
    """Run what ends a group: it may wait for a rank that is gone, and is then left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_CLOSE_WAIT_S)


@contextmanager
def collective(group: Group, kind: int) -> Iterator[None]:
    """Around one: it is counted, what it takes is added to the group's seconds, and if it fails, a peer is gone."""
    group.count(kind)
    group.where.wait(IN_CALL)
    began = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        raise FabricError(str(error)) from error
    finally:
        group.seconds += time.perf_counter() - began
    group.where.wait(0)


class GlooGroup(Group):
    """Ranks on CPUs, over the network. Not torch's default group, so several engines can live in one process."""

    in_graphs = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seconds = 0.0
        self.calls = 0
        self._check: Check = nothing_to_say

    def connect(self, store: Store, host: str, check: Check = nothing_to_say) -> None:
        """Meet the other ranks through a store, and talk to them from this address. Every rank must come.

        While a collective takes long, `check` is called now and then: it raises if waiting is in vain.
        """
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = COLLECTIVE_TIMEOUT
        self._check = check
        try:
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise FabricError(str(error)) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with collective(self, ALL_REDUCE):
            self._finish(self._group.allreduce([tensor]))
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        rows, widest = tensor.shape[0], max(widths)
        padded = tensor.new_zeros(rows, widest)
        padded[:, : tensor.shape[1]] = tensor
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with collective(self, GATHER):
            self._finish(self._group.allgather([gathered], [padded]))
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)

    def _finish(self, work: dist.Work) -> None:
        """Wait in slices: a slice that ends too early raises, and leaves the work running."""
        while True:
            try:
                work.wait(_WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return
            self._check()

    def close(self) -> None:
        """Destroying a group waits for its collectives, and one that lost its peer takes until its time-out."""
        held = [self.__dict__.pop("_group", None)]
        with_patience(held.clear)
