"""A tiny DeepSeek V4 by the Triton kernels of its attention and streams; run with TRITON_INTERPRET=1 and a folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.kernels.gpu import hyper as gpu
from phalanx.kernels.hyper import Mixing, Weights
from phalanx.kernels.tiling import PrefillTiles, tile_prompt
from phalanx.layers import hyper
from phalanx.layers.mixers.compressed import CompressedAttention
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.spec.hyper import Hyper
from phalanx.weights.checkpoint import Checkpoint
from tests.kernels.interpreter import make_ready

BLOCK, BLOCKS = 5, 8
CHUNKS = [(1, 2), (3, 11), (1, 1)]
"""What each of two sequences computes in a step; rows of one token come first."""


def part_streams(streams: Tensor, weights: Weights, told: Hyper) -> tuple[Tensor, Mixing]:
    mapped = torch.nn.functional.linear(streams.flatten(1).float(), weights.fn)
    taken, post, comb = gpu.part_streams(streams, mapped, weights.base, weights.scale, weights.norm_eps, told)
    return taken, Mixing(post, comb)


def mix_streams(streams: Tensor, given: Tensor, mixing: Mixing) -> Tensor:
    return gpu.mix_streams(streams, given, *mixing)


def computed(folder: Path, by_rows: bool) -> Tensor:
    """Logits of all rows of some steps."""
    model = load_model(EngineConfig(), Checkpoint(folder), Solo(), progress=lambda done, total: None)
    for layer in model.layers:
        assert isinstance(layer.mixer, CompressedAttention)
        layer.mixer.by_rows = by_rows
    config = EngineConfig(max_num_seqs=2, block_size=BLOCK)
    runner = make_runner(config, model, Sizes(num_blocks=BLOCKS, max_model_len=20))
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(model.place.spec.vocab, (2, 20), generator=generator).tolist()
    places = torch.randperm(BLOCKS, generator=generator).view(2, -1).tolist()
    new = [Admission(slot, len(prompt), prompt, 0, SamplingParams()) for slot, prompt in enumerate(prompts)]
    blocks, starts, found = list(enumerate(places)), [0, 0], []
    for number, counts in enumerate(CHUNKS, 1):
        plan = StepPlan(number, new, [0, 1], starts, list(counts), [0, 0], blocks)
        inputs = runner.batch.prepare(plan)
        attention = inputs.attention
        if by_rows and attention.prefills:
            tables = runner.batch._tables[0]
            cut = [
                tile for row in attention.prefills for tile in tile_prompt(row.slot, row.first, row.count, row.start)
            ]
            tiles = PrefillTiles(tables, torch.tensor(cut, dtype=torch.int32), True)
            attention = replace(attention, prefills=[], tiles=tiles)
        found.append(model.scores(model(inputs.tokens, inputs.positions, attention)))
        new, blocks, starts = [], [], [start + count for start, count in zip(starts, counts, strict=True)]
    return torch.cat(found)


def main() -> None:
    make_ready()
    folder = Path(sys.argv[1])
    with torch.inference_mode():
        wanted = computed(folder, by_rows=False)
        hyper.part_streams, hyper.mix_streams = part_streams, mix_streams
        found = computed(folder, by_rows=True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


if __name__ == "__main__":
    main()
