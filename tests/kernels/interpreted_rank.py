"""One rank of tests/kernels/test_all_reduce.py: `python -m tests.kernels.interpreted_rank FOLDER SIZE RANK`."""

from __future__ import annotations

import mmap
import sys
import time
from itertools import count
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpreterBuilder

assert triton.knobs.runtime.interpret

from phalanx.kernels.fp8 import Form, InBoth, Quantised, dequantise  # noqa: E402
from phalanx.kernels.gpu import all_reduce, rows, stamps  # noqa: E402
from phalanx.kernels.gpu.all_reduce import AREA_BYTES, Peers  # noqa: E402
from phalanx.kernels.norm import add_rms_norm_torch  # noqa: E402
from phalanx.kernels.quantise import quantise_torch  # noqa: E402
from tests.kernels.interpreter import make_ready  # noqa: E402

PROGRAMS = 2
"""Far fewer than on a GPU, so that small calls already need several rounds and several pieces."""
TILE = all_reduce.TILE_BYTES // 4


def map_areas(folder: Path, size: int) -> tuple[list[Tensor], list[int]]:
    """Every rank's area, in files that all ranks map."""
    areas = []
    for rank in range(size):
        with (folder / f"area-{rank}").open("a+b") as file:
            file.truncate(AREA_BYTES)
            areas.append(torch.frombuffer(mmap.mmap(file.fileno(), AREA_BYTES), dtype=torch.uint8))
    return areas, [area.data_ptr() for area in areas]


def all_parts(seed: int, shape: tuple[int, ...], size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(size)]


def total(parts: list[Tensor]) -> Tensor:
    """In rank order, as the kernels add: the same bits."""
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    return whole


def check_sum(seed: int, peers: Peers, elements: int, two_shot: bool) -> None:
    parts = all_parts(seed, (elements,), peers.size)
    x = parts[peers.rank].clone()
    (all_reduce.two_shot if two_shot else all_reduce.one_shot)(x, peers)
    assert torch.equal(x, total(parts))


def check_norm(seed: int, peers: Peers, count: int, width: int, form: Form) -> None:
    parts = all_parts(seed, (count, width), peers.size)
    (weight,), (residual,) = all_parts(seed + 100, (width,), 1), all_parts(seed + 200, (count, width), 1)
    kept = residual.clone()
    found = all_reduce.one_shot_add_rms_norm(parts[peers.rank].clone(), kept, weight, 1e-5, form, peers)
    whole = residual + total(parts)
    assert torch.equal(kept, whole)
    wanted, tolerance = add_rms_norm_torch(whole, None, weight, 1e-5), 1e-5
    if isinstance(found, InBoth):
        for given, brought in zip(found.in_fp8, rows.quantise(found.plain), strict=True):
            assert torch.equal(given, brought)
        found = found.plain
    if isinstance(found, Quantised):
        torch.testing.assert_close(found.scales, quantise_torch(wanted).scales)
        found, tolerance = dequantise(found.values, found.scales, 1, torch.float32), 0.2  # the interpreter rounds badly
    error = float((found - wanted).norm() / wanted.norm())
    assert error < tolerance, (count, width, form, error)


def check_gather(seed: int, peers: Peers, rows: int, widths: list[int]) -> None:
    whole = all_parts(seed, (rows, sum(widths)), 1)[0]
    edges = torch.tensor([sum(widths[:rank]) for rank in range(len(widths) + 1)])
    own = whole.split(widths, dim=1)[peers.rank].contiguous()
    assert torch.equal(all_reduce.gather_columns(own, widths, edges, peers), whole)


def run_without_a_gpu(rank: int, size: int) -> None:
    """What the interpreter lacks is left out, and whoever waits for a flag lets others run.

    Behind each meeting one rank lingers before it reads, while the others are already in the next call.
    """
    make_ready()
    atomic = InterpreterBuilder.create_atomic_rmw

    def atomic_and_rest(*arguments: object) -> object:
        time.sleep(1e-4)
        return atomic(*arguments)

    InterpreterBuilder.create_atomic_rmw = atomic_and_rest
    meet, meetings = all_reduce._meet, count()

    def meet_and_linger(*arguments: object) -> None:
        meet(*arguments)
        time.sleep(0.04 if next(meetings) % size == rank else 0)

    all_reduce._meet = meet_and_linger


def main() -> None:
    folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run_without_a_gpu(rank, size)
    all_reduce.PROGRAMS = PROGRAMS
    areas, addresses = map_areas(folder, size)
    peers = Peers(rank, size, torch.tensor(addresses))
    for seed in range(2):
        is_traced = seed == 1
        for check, *arguments in (
            (check_sum, 5, False),
            (check_sum, TILE + 7, True),
            (check_norm, 3, 144, Form.PLAIN),
            (check_gather, 2, [TILE + 5, 0, 16][:size]),
            (check_sum, TILE + 2, False),
            (check_norm, PROGRAMS + 2, 8, Form.PLAIN),
            (check_sum, (PROGRAMS * all_reduce.SLOT_TILES + 1) * TILE, True),
            (check_norm, 2, 256, Form.FP8),
            (check_norm, 3, 200, Form.BOTH),
            (check_gather, 17, [TILE + 16, 32, 64][:size]),
        ):
            place, ticks = torch.zeros(2, dtype=torch.int64), count(1)
            cuda.globaltimer = lambda ticks=ticks: next(ticks)
            stamps.want(place if is_traced else None)
            check(seed, peers, *arguments)  # type: ignore[operator]
            assert place.tolist() == ([1, 2] if is_traced else [0, 0]), (
                "when it began and when it ended, in one piece or two"
            )
            assert next(ticks) == (3 if is_traced else 1)
    calls = areas[rank][: 8 * PROGRAMS].view(torch.int64)
    assert calls[0] == 2 * (8 + 2 + 2), "two of ten were cut into two pieces"


if __name__ == "__main__":
    main()
