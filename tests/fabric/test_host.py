"""Ranks that share memory: sums and gathers of every size, from ranks that are sometimes early and sometimes late."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.fabric import host
from phalanx.fabric.group import open_store
from phalanx.fabric.host import HostGroup
from phalanx.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")

RANKS = 3


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostGroup]]:
    """With slots of 4 KiB, so that little is much."""
    monkeypatch.setattr(host, "_SLOT_BYTES", 4096)
    monkeypatch.setattr(host, "_MEMORY_FOLDER", tmp_path)
    members = [HostGroup(rank, RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        store = str(tmp_path / "rendezvous")
        list(pool.map(lambda group: group.connect(open_store(store, RANKS), "127.0.0.1"), members))
    yield members
    for group in members:
        group.close()


def parts_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[Tensor]:
    random_numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random_numbers).to(dtype) for _ in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_all_sizes_are_the_same_bits_on_every_rank(groups: list[HostGroup], dtype: torch.dtype) -> None:
    shapes = [(1,), (7, 144), (1024,), (1025,), (5000,), (3, 4096), (0,)]

    def sums(group: HostGroup) -> list[Tensor]:
        return [group.all_reduce(parts_of(shape, seed, dtype)[group.rank]) for seed, shape in enumerate(shapes)]

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(sums, groups))
    for seed, shape in enumerate(shapes):
        first, *others = parts_of(shape, seed, dtype)
        for other in others:
            first += other
        assert all(torch.equal(of_rank[seed], first) for of_rank in found)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("widths", [[100, 99, 57], [100, 100, 0]])
def test_columns_of_uneven_widths_come_side_by_side(groups: list[HostGroup], rows: int, widths: list[int]) -> None:
    columns = [torch.randn(rows, width) for width in widths]
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(lambda group: group.all_gather_columns(columns[group.rank], widths), groups))
    assert all(torch.equal(gathered, torch.cat(columns, 1)) for gathered in found)


def test_nobody_overwrites_what_another_still_reads(groups: list[HostGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks dawdle between meeting and reading, and before they write."""
    exchange = HostGroup._exchange

    def slowly(group: HostGroup, *arguments: object) -> list[Tensor]:
        wait = random.Random(group._round * RANKS + group.rank).choice([0, 0, 0.002, 0.004])
        parts = exchange(group, *arguments)  # type: ignore[arg-type]
        time.sleep(wait)
        return parts

    monkeypatch.setattr(HostGroup, "_exchange", slowly)
    rounds = 150

    def sums(group: HostGroup) -> list[float]:
        return [
            group.all_reduce(torch.full((16,), float(step * (group.rank + 1)))).sum().item() for step in range(rounds)
        ]

    with ThreadPoolExecutor(RANKS) as pool:
        for found in pool.map(sums, groups):
            assert found == [16.0 * step * (1 + 2 + 3) for step in range(rounds)]


def test_too_little_memory_for_files_means_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where writing beyond what there is would end the process."""
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    memory.mkdir()
    temporary.mkdir()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host, "_MEMORY_FOLDER", memory)
    monkeypatch.setattr(host.os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    descriptor, path = host._new_file(10_000)
    os.close(descriptor)
    assert Path(path).parent == temporary
    assert Path(path).stat().st_size == 10_000
    assert not list(memory.iterdir())


def test_the_file_has_no_name_once_all_have_come(groups: list[HostGroup], tmp_path: Path) -> None:
    assert {path.name for path in tmp_path.iterdir()} <= {"rendezvous"}


def test_a_rank_that_waits_long_leaves_the_core_to_others() -> None:
    flags = torch.zeros(2 * host._LINE_BYTES, dtype=torch.uint8)
    began, worked = time.perf_counter(), time.thread_time()
    assert not cpu.meet(flags, 0, 2, 1, host._LOOKS)
    assert time.thread_time() - worked < (time.perf_counter() - began) / 2
