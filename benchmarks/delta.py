"""Gated delta nets alone on a GPU: `python benchmarks/delta.py`. Times of each kernel beside the bytes it has to move,
and how far states are from those of the definition.

Decode steps of 1 to 256 rows as graphs, prompts kernel by kernel. States of several layers take turns, so that none
is still in the L2 cache when it comes round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta import delta_net_torch
from phalanx.kernels.delta_weights import DeltaWeights
from phalanx.kernels.gpu import delta, delta_prompts
from phalanx.kernels.gpu.delta import delta_net
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt

NETS = {"35b-a3b": (16, 32), "27b": (16, 48)}
DIM, KERNEL, LAYERS = 128, 4, 4
BYTES_PER_S = 4.3e12
GPU = torch.device("cuda")


class Layer:
    """A net with states for so many sequences."""

    def __init__(self, k_heads: int, v_heads: int, places: int) -> None:
        channels = (2 * k_heads + v_heads) * DIM
        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": GPU}
        rates = torch.full((v_heads,), -3.0, device=GPU), torch.zeros(v_heads, device=GPU)
        taps, norm = torch.randn(channels, KERNEL, **half), torch.ones(DIM, **half)
        self.net = DeltaWeights(k_heads, v_heads, DIM, DIM, taps, *rates, norm, 1e-6)
        self.states = torch.zeros(places, v_heads, DIM, DIM, device=GPU)
        self.columns = torch.zeros(places, KERNEL, channels, **half)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        width, v_heads = sum(self.net.widths) + self.net.widths[2], self.net.v_heads
        made = (torch.randn(tokens, columns, dtype=torch.bfloat16, device=GPU) for columns in (width, 2 * v_heads))
        return next(made), next(made)


Batch = tuple[DecodeRows | None, PrefillTiles | None]


def decode_batch(rows: int) -> Batch:
    tables = torch.zeros(rows + 1, 1, dtype=torch.int32, device=GPU)
    slots = torch.arange(rows, device=GPU)
    return DecodeRows(tables, slots, torch.full_like(slots, 100)), None


def prompt_batch(prompts: int, length: int) -> Batch:
    tiles = [tile for number in range(prompts) for tile in tile_prompt(number, number * length, length, 0)]
    sent = torch.tensor(tiles, dtype=torch.int32, device=GPU)
    return None, PrefillTiles(sent, sent, False)


def seconds(run: Callable[[], object], times: int = 20) -> float:
    """Of one of many runs behind each other."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_decodes(name: str, rows: int) -> None:
    k_heads, v_heads = NETS[name]
    layers = [Layer(k_heads, v_heads, rows + 1) for _ in range(max(LAYERS, 128 // rows))]
    batch, (qkvz, rates) = decode_batch(rows), layers[0].inputs(rows)

    def run() -> None:
        for layer in layers:
            delta_net(qkvz, rates, layer.net, layer.states, layer.columns, *batch, quantised=True)

    took = seconds(captured(run).replay) / len(layers)
    moved = rows * (2 * 4 * v_heads * DIM * DIM + qkvz.nbytes // rows)
    told(f"{name} decode {rows}", took, moved)


def time_prompts(name: str, prompts: int, length: int) -> None:
    layer = Layer(*NETS[name], prompts)
    batch, (qkvz, rates) = prompt_batch(prompts, length), layer.inputs(prompts * length)

    def run() -> None:
        delta_net(qkvz, rates, layer.net, layer.states, layer.columns, *batch, quantised=True)

    took = seconds(run)
    told(f"{name} prompts {prompts}x{length}", took, qkvz.nbytes + qkvz.nbytes // 6)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    for event in profiled.key_averages():
        print(f"    {event.key[:60]:60} {event.device_time_total:9.1f} us")


def tell_error(name: str, tokens: int) -> None:
    """Root mean squares of the difference of the states, and of what is read, over those of the definition."""
    ours, theirs = Layer(*NETS[name], 1), Layer(*NETS[name], 1)
    qkvz, rates = ours.inputs(tokens)
    batch = AttentionBatch(qkvz, None, [PrefillRow(0, tokens, 0, qkvz, 0)])
    found = delta_net(qkvz, rates, ours.net, ours.states, ours.columns, *prompt_batch(1, tokens))
    wanted = delta_net_torch(qkvz, rates, ours.net, theirs.states, theirs.columns, batch)
    assert isinstance(found, torch.Tensor)
    pairs = {"state": (ours.states, theirs.states), "read": (found.float(), wanted.float())}
    for part, (one, other) in pairs.items():
        error = float((one - other).norm() / other.norm())
        print(f"{name} {tokens} tokens, error of {part}: {error:.2e}, most {float((one - other).abs().max()):.2e}")


def told(case: str, took: float, moved: int) -> None:
    limit = moved / BYTES_PER_S
    print(f"{case:28} {took * 1e6:9.1f} us, limit {limit * 1e6:8.1f} us, {limit / took:5.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="*", choices=list(NETS), default=list(NETS))
    parser.add_argument("--values", type=int, default=delta_prompts.VALUES_AT_ONCE, help="columns of a state at once")
    parser.add_argument("--registers", type=int, default=delta.MOST_REGISTERS, help="of a thread that decodes")
    asked = parser.parse_args()
    delta_prompts.VALUES_AT_ONCE, delta.MOST_REGISTERS = asked.values, asked.registers
    for name in asked.nets:
        for rows in (1, 8, 32, 128, 256):
            time_decodes(name, rows)
        for prompts, length in ((1, 128), (1, 1024), (16, 1024), (1, 16384)):
            time_prompts(name, prompts, length)
        tell_error(name, 1000)


if __name__ == "__main__":
    main()
