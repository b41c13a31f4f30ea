"""PeerGroup: ranks of one machine that read each other's GPU memory; also ranks that share a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.engine.whereabouts import ALL_REDUCE, FOR_DEVICE, GATHER, IN_CALL
from phalanx.fabric import cuda_ipc
from phalanx.fabric.group import CHECK_EVERY_S, Check, FabricError, Group, nothing_to_say, poll, with_patience
from phalanx.fabric.nccl import NcclGroup
from phalanx.kernels.fp8 import Activations, Form

_KIB, _MIB = 2**10, 2**20
_COPY_LOOK_S = 0.001
_RELEASED = 0x7F
"""Every byte of a flag that no meeting waits for."""


def one_shot_bytes(size: int) -> int:
    """Up to here every rank reads all of every other's part: one meeting, but size - 1 times the data over its links.

    Above it the second meeting of the two-shot costs less than those bytes: about 2 us against 0.5 us for each 256 KiB
    from one peer at 450 GB/s. From the data sheet, not measured.
    """
    return 256 * _KIB if size <= 4 else 128 * _KIB


TWO_SHOT_BYTES = 8 * _MIB
"""Above, NCCL: meetings no longer count, and it can add up in the switch."""


class PeerGroup(Group):
    """Small sums over peer memory, large ones over NCCL.

    Where ranks share a GPU, which NCCL refuses, all go over memory.
    """

    in_graphs = True
    seconds = 0.0

    def __init__(self, rank: int, size: int, device: torch.device, large: NcclGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.calls = 0
        self._large = large
        self._check: Check = nothing_to_say
        self._areas: list[int] = []
        self._edges: dict[tuple[int, ...], Tensor] = {}

    def connect(self, store: Store, host: str, check: Check = nothing_to_say) -> None:
        """Map every rank's area. Every rank must come."""
        self._check = check
        try:
            self._map_areas(PrefixStore("peer", store))
        except RuntimeError as error:
            raise FabricError(str(error)) from error
        self.where.look = self._look
        if self._large is not None:
            self._large.connect(store, host, check)

    def _map_areas(self, shelf: Store) -> None:
        from phalanx.kernels.gpu.all_reduce import AREA_BYTES, FLAGS_AT, FLAGS_BYTES, Peers

        with torch.cuda.device(self.device):
            self._beside = torch.cuda.Stream()
            self._released = torch.full((FLAGS_BYTES,), _RELEASED, dtype=torch.uint8, pin_memory=True)
            torch.cuda.synchronize()
            own = cuda_ipc.allocate(AREA_BYTES)
            shelf.set(str(self.rank), cuda_ipc.handle_of(own).hex())
            handles = [bytes.fromhex(shelf.get(str(rank)).decode()) for rank in range(self.size)]
            self._areas = [
                own if rank == self.rank else cuda_ipc.open_handle(handle) for rank, handle in enumerate(handles)
            ]
            self._books = torch.empty(FLAGS_AT + 8 * self.size, dtype=torch.uint8, pin_memory=True)
            self._peers = Peers(self.rank, self.size, torch.tensor(self._areas, device=self.device))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        from phalanx.kernels.gpu import all_reduce

        self.count(ALL_REDUCE)
        if tensor.nbytes <= one_shot_bytes(self.size):
            all_reduce.one_shot(tensor, self._peers)
        elif tensor.nbytes <= TWO_SHOT_BYTES or self._large is None:
            all_reduce.two_shot(tensor, self._peers)
        else:
            self._large.all_reduce(tensor)
        return tensor

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Form) -> Activations:
        from phalanx.kernels.gpu.all_reduce import fits_one_norm, one_shot_add_rms_norm

        if x.nbytes <= one_shot_bytes(self.size) and fits_one_norm(x):
            self.count(ALL_REDUCE)
            return one_shot_add_rms_norm(x, residual, weight, eps, form, self._peers)
        return super().all_reduce_add_norm(x, residual, weight, eps, form)

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        from phalanx.kernels.gpu.all_reduce import gather_columns

        self.count(GATHER)
        return gather_columns(tensor, list(widths), self._edges_of(tuple(widths)), self._peers)

    def _edges_of(self, widths: tuple[int, ...]) -> Tensor:
        """Made once: a graph cannot copy from the host, and holds on to it."""
        if widths not in self._edges:
            edges = [sum(widths[:rank]) for rank in range(self.size + 1)]
            self._edges[widths] = torch.tensor(edges, device=self.device)
        return self._edges[widths]

    def wait_for(self, event: torch.cuda.Event) -> None:
        poll(event, self._check, self.where)

    def _look(self) -> None:
        """The first program of every kernel has counted its calls and raised its flag: a copy engine fetches both.

        That works while kernels wait, and inside graphs; a GPU that does not even copy has no answer.
        """
        if not self._areas:
            return
        self.where.reached(-1)
        with torch.cuda.device(self.device):
            self._beside.query()
            cuda_ipc.copy_out(
                self._books.data_ptr(), self._areas[self.rank], self._books.nbytes, self._beside.cuda_stream
            )
            deadline = time.monotonic() + CHECK_EVERY_S
            while not self._beside.query():
                if time.monotonic() > deadline:
                    return
                time.sleep(_COPY_LOOK_S)
        numbers = self._books.view(torch.int64)
        calls, stage = int(numbers[0]), int(numbers[self.rank - self.size])
        self.where.reached(stage)
        self.where.wait(IN_CALL if stage > 2 * calls else FOR_DEVICE)

    def close(self) -> None:
        """First let go whatever waits for flags that will never rise, else nothing on this device ends any more."""
        if self._large is not None:
            self._large.close()
        areas, self._areas = self._areas, []
        if areas:
            with_patience(lambda: self._let_go(areas))

    def _let_go(self, areas: list[int]) -> None:
        """A device that failed cannot be freed of anything, and need not be.

        Stream and bytes are from before: making them could wait for what is to be let go.
        """
        from phalanx.kernels.gpu.all_reduce import FLAGS_AT

        with suppress(RuntimeError), torch.cuda.device(self.device):
            self._beside.query()  # binds the device to this thread, which the driver's own calls do not
            flags, released = areas[self.rank] + FLAGS_AT, self._released
            cuda_ipc.copy_in(flags, released.data_ptr(), released.nbytes, self._beside.cuda_stream)
            torch.cuda.synchronize()
            for rank, area in enumerate(areas):
                (cuda_ipc.free if rank == self.rank else cuda_ipc.close_handle)(area)
