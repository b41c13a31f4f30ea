"""Gated delta nets alone on a GPU: `python benchmarks/delta.py`. Times of each kernel beside the bytes it has to move,
and how far states are from those of the definition.

Decode steps of 1 to 256 rows as graphs, with and without drafts, prompts kernel by kernel. States of several layers
take turns, so that none is still in the L2 cache when it comes round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graph_timing import microseconds
from torch.profiler import ProfilerActivity, profile

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta import delta_net_torch
from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.gpu import delta_prompts
from phalanx.kernels.gpu.delta import delta_net
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from phalanx.spec.delta import updates_beside

NETS = {"35b-a3b": (16, 32), "27b": (16, 48)}
DIM, KERNEL, LAYERS = 128, 4, 4
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES_PER_S = 4.3e12
GPU = torch.device("cuda")


class Layer:
    """A net with states for so many sequences, of which a step may have so many tokens as `most`."""

    def __init__(
        self, k_heads: int, v_heads: int, places: int, most: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        channels = (2 * k_heads + v_heads) * DIM
        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": GPU}
        rates = torch.full((v_heads,), -3.0, device=GPU), torch.zeros(v_heads, device=GPU)
        taps, norm = torch.randn(channels, KERNEL, **half), torch.ones(DIM, **half)
        self.net = DeltaWeights(k_heads, v_heads, DIM, DIM, taps, *rates, norm, 1e-6)
        self.states = torch.zeros(places, v_heads, DIM, DIM, device=GPU, dtype=dtype)
        self.columns = torch.zeros(places, KERNEL - 1 + most, channels, **half)
        updates = torch.zeros(places, updates_beside(most), v_heads, 2 * DIM + 1, device=GPU)
        since = torch.full((places, v_heads, DIM), 100, dtype=torch.int32, device=GPU)
        self.pending = PendingUpdates(updates, since, most)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        width, v_heads = sum(self.net.widths) + self.net.widths[2], self.net.v_heads
        made = (torch.randn(tokens, columns, dtype=torch.bfloat16, device=GPU) for columns in (width, 2 * v_heads))
        return next(made), next(made)


Batch = tuple[DecodeRows | None, PrefillTiles | None]


def decode_rows(sequences: int, tokens: int) -> DecodeRows:
    """So many tokens of each sequence, which are not all where their states are written."""
    tables = torch.zeros(sequences + 1, 1, dtype=torch.int32, device=GPU)
    slots = torch.arange(sequences, device=GPU).repeat_interleave(tokens)
    begun = 100 + torch.randint(0, 8, (sequences,), device=GPU)
    positions = begun[slots] + torch.arange(tokens, device=GPU).repeat(sequences)
    return DecodeRows(tables, slots, positions, apart=tokens == 1)


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


def time_decodes(name: str, sequences: int, tokens: int, dtype: torch.dtype) -> None:
    """Steps go on by what is accepted: with drafts, by a token fewer than there are."""
    layers = [Layer(*NETS[name], sequences + 1, tokens, dtype) for _ in range(max(LAYERS, 128 // sequences))]
    decode, (qkvz, rates) = decode_rows(sequences, tokens), layers[0].inputs(sequences * tokens)

    def step(layer: Layer) -> None:
        delta_net(qkvz, rates, layer.net, layer.states, layer.columns, decode, None, layer.pending, quantised=True)

    runs = [partial(step, layer) for layer in layers]
    runs.append(lambda: decode.positions.add_(max(1, tokens - 1)))
    took = microseconds(runs) * len(runs) / len(layers) * 1e-6
    moved = layers[0].states[:-1].nbytes + qkvz.nbytes
    told(f"{name} decode {sequences}x{tokens}", took, moved)


def time_prompts(name: str, prompts: int, length: int) -> None:
    layer = Layer(*NETS[name], prompts)
    batch, (qkvz, rates) = prompt_batch(prompts, length), layer.inputs(prompts * length)

    def run() -> None:
        delta_net(qkvz, rates, layer.net, layer.states, layer.columns, *batch, layer.pending, quantised=True)

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
    found = delta_net(qkvz, rates, ours.net, ours.states, ours.columns, *prompt_batch(1, tokens), ours.pending)
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
    way = delta_prompts.NARROW[torch.bfloat16]
    parser.add_argument("--values", type=int, default=way.values, help="columns of a state at once")
    parser.add_argument("--states", choices=list(STATES), default="fp32", help="of what decodes read")
    asked = parser.parse_args()
    delta_prompts.NARROW[torch.bfloat16] = way._replace(values=asked.values)
    for name in asked.nets:
        for sequences, tokens in ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 4), (8, 4), (32, 4)):
            time_decodes(name, sequences, tokens, STATES[asked.states])
        for prompts, length in ((1, 128), (1, 1024), (16, 1024), (1, 16384)):
            time_prompts(name, prompts, length)
        tell_error(name, 1000)


if __name__ == "__main__":
    main()
