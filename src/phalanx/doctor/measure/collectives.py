"""All-reduces of one rank: how long they take, and whether their sums are right."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.doctor.measure.messages import Began, Checked, MeasureAssignment, MeasureReport, Timed, written
from phalanx.fabric.group import GlooGroup, open_store

_KIB, _MIB = 2**10, 2**20
_GPU_SIZES = tuple(8 * _KIB << power for power in range(14))
_CPU_SIZES = (8 * _KIB, 64 * _KIB, 512 * _KIB, 4 * _MIB)
_GPU_CHECKS = ((8 * _KIB, 8), (_MIB, 8), (64 * _MIB, 1))
_CPU_CHECKS = ((8 * _KIB, 4), (_MIB, 4))
"""Bytes, and rounds of each dtype."""
_EXACT = {torch.int32: 2**31 - 1, torch.float32: 2**24, torch.bfloat16: 2**8}
"""Whole numbers up to this are exact, so that a sum within it is the same in any order."""
_CALLS = {"cuda": 20, "cpu": 4}
_SAMPLES = 11
_WARM = 2
_NCCL_TIMEOUT = timedelta(minutes=5)


class Collective(Protocol):
    device: torch.device

    def all_reduce(self, tensor: Tensor) -> object: ...

    def seconds(self, source: Tensor, calls: int) -> Iterator[float]:
        """Of one all-reduce, again and again, without end: each time the mean of `calls` in a row."""
        ...


class GlooPeers:
    """Ranks on the CPU, in the group that serving uses."""

    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self._group = GlooGroup(rank, ranks)
        self._group.connect(open_store(str(folder / "rendezvous"), ranks), "127.0.0.1")

    def all_reduce(self, tensor: Tensor) -> object:
        return self._group.all_reduce(tensor)

    def seconds(self, source: Tensor, calls: int) -> Iterator[float]:
        together, buffer = torch.ones(1), torch.empty_like(source)
        while True:
            buffer.copy_(source)
            self._group.all_reduce(together.fill_(1))
            began = time.perf_counter()
            for _ in range(calls):
                self._group.all_reduce(buffer)
            yield (time.perf_counter() - began) / calls


class NcclPeers:
    """One rank a GPU. Its process has no other use, so torch's default group is taken.

    Times are of a CUDA graph, as in serving and in the cost model's tables: launched one by one, small all-reduces
    would be timed at the speed of Python.
    """

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        store = dist.FileStore(str(folder / "rendezvous"), ranks)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks, timeout=_NCCL_TIMEOUT, device_id=self.device
        )

    def all_reduce(self, tensor: Tensor) -> object:
        return dist.all_reduce(tensor)

    def seconds(self, source: Tensor, calls: int) -> Iterator[float]:
        buffer = source.clone()
        dist.all_reduce(buffer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events from a thread of its own: only this thread's calls may break the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                dist.all_reduce(buffer)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            buffer.copy_(source)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            yield start.elapsed_time(end) / 1e3 / calls


def all_reduces(assignment: MeasureAssignment) -> Iterator[MeasureReport]:
    """Meet the other ranks, time every size, check every sum."""
    rank, ranks, on_gpu = assignment.rank, assignment.ranks, assignment.device == "cuda"
    yield Began(f"meeting {ranks} ranks")
    peers: Collective = (NcclPeers if on_gpu else GlooPeers)(rank, ranks, Path(assignment.folder))
    for size in _GPU_SIZES if on_gpu else _CPU_SIZES:
        yield Began(f"an all-reduce of {written(size)} over {ranks} ranks")
        yield Timed(size, time_one(peers, size) * 1e6)
    checks = _GPU_CHECKS if on_gpu else _CPU_CHECKS
    rounds = ((size, dtype) for size, count in checks for dtype in _EXACT for _ in range(count))
    for number, (size, dtype) in enumerate(rounds):
        yield Began(f"a checked sum of {written(size)} over {ranks} ranks")
        yield check_one(peers, assignment, size, dtype, number)


def time_one(peers: Collective, size: int) -> float:
    """The median. Sums grow with every call, so the buffer is filled again before they leave the number format."""
    dtype = torch.bfloat16 if peers.device.type == "cuda" else torch.float32
    source = torch.rand(size // dtype.itemsize, device=peers.device, dtype=dtype)
    samples = peers.seconds(source, _CALLS[peers.device.type])
    return median([next(samples) for _ in range(_WARM + _SAMPLES)][_WARM:])


def check_one(peers: Collective, assignment: MeasureAssignment, size: int, dtype: torch.dtype, number: int) -> Checked:
    """One sum of random whole numbers, held against the sum that every rank can tell beforehand, on the CPU."""
    count, bound = size // dtype.itemsize, _EXACT[dtype] // assignment.ranks
    seeds = [((assignment.seed + number) << 16) + rank for rank in range(assignment.ranks)]
    mine = _random(count, bound, seeds[assignment.rank]).to(dtype).to(peers.device)
    peers.all_reduce(mine)
    found = mine.cpu()
    expected = torch.zeros(count, dtype=torch.int32)
    for seed in seeds:
        expected += _random(count, bound, seed)
    right = expected.to(dtype)
    return Checked(size, number, int((found != right).sum()), _checksum(found), _checksum(right))


def _random(count: int, bound: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, (count,), generator=generator, dtype=torch.int32)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)
