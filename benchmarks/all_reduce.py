"""Times all-reduces of decode sizes over this machine's GPUs: `python benchmarks/all_reduce.py [RANKS]`.

One rank a GPU. With fewer GPUs than ranks they share them: then the figures are those of the driver's time slices, and
only show that it works. Times are of a CUDA graph of 20 calls, the median of 11.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from phalanx.fabric.choose import choose_group
from phalanx.fabric.group import Group, open_store
from phalanx.fabric.nccl import NcclGroup
from phalanx.fabric.peer import PeerGroup
from phalanx.kernels.fp8 import Form

WIDTH = 8192
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CALLS, SAMPLES = 20, 11


def microseconds(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(SAMPLES + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(times[2:])


def time_rank(folder: str, size: int, rank: int) -> None:
    gpus = [each % torch.cuda.device_count() for each in range(size)]
    device = torch.device("cuda", gpus[rank])
    torch.cuda.set_device(device)
    group = choose_group(rank, size, device, gpus)
    group.connect(open_store(f"{folder}/rendezvous", size), "127.0.0.1")
    ways: dict[str, Group] = {"chosen": group}
    if isinstance(group, PeerGroup) and isinstance(group._large, NcclGroup):
        ways["NCCL"] = group._large
    if rank == 0:
        shared = ", which share GPUs: slow, and no measure of a fabric" if len(set(gpus)) < size else ""
        print(f"{size} ranks on {torch.cuda.get_device_name(device)}{shared}; bf16, rows of {WIDTH}; microseconds")
        print(f"{'rows':>5} {'KiB':>6}" + "".join(f" {name + suffix:>14}" for name in ways for suffix in ("", "+norm")))
    for rows in ROWS:
        line = f"{rows:>5} {rows * WIDTH * 2 // 1024:>6}"
        for way in ways.values():
            line += "".join(f" {each:>14.1f}" for each in time_rows(way, rows, device))
        if rank == 0:
            print(line, flush=True)


def time_rows(group: Group, rows: int, device: torch.device) -> tuple[float, float]:
    """A sum alone, and with the norm behind it. Sums grow until they overflow, which takes no longer."""
    x, residual, weight = (
        torch.randn(shape, device=device).bfloat16() for shape in ((rows, WIDTH), (rows, WIDTH), (WIDTH,))
    )
    return (
        microseconds(lambda: group.all_reduce(x)),
        microseconds(lambda: group.all_reduce_add_norm(x, residual, weight, 1e-5, Form.PLAIN)),
    )


def main() -> None:
    if len(sys.argv) == 4:
        return time_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    size = int(sys.argv[1]) if len(sys.argv) > 1 else max(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), folder, str(size)]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
        sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
