"""Short steps that hold prompts as CUDA graphs: what takes longer to launch than to compute is launched once."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engine.plan import StepPlan
from phalanx.kernels.attention import PROMPT_TILE, tile_prompt
from phalanx.models.decoder import Decoder
from phalanx.runtime.batch import Batch, tensor_of
from phalanx.runtime.graphs import Recorded, Recorder, score_and_keep
from phalanx.spec import ModelSpec

TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of the graphs. Every row that fills up is computed like the others."""

DECODES = (0, 4, 16, 64, 256)
"""Rows of one token that they have room for. Room costs next to nothing, but too much of it leaves a long context
undivided among the GPU's processors.
"""

MOST_PROMPTS = 16

LAUNCH_S_PER_LAYER = 0.5e-3
FLOPS_PER_S = 600e12
"""What a layer takes to launch, kernel by kernel, and what a large GPU computes, both measured on an H200."""


class GraphSize(NamedTuple):
    """What a graph has room for: rows in all, and how many of the first ones may be single tokens of their sequence."""

    tokens: int
    decodes: int

    @property
    def prompts(self) -> int:
        return min(MOST_PROMPTS, self.tokens // 8)

    @property
    def samples(self) -> int:
        return self.decodes + self.prompts

    @property
    def tiles(self) -> int:
        """Each prompt, and the rows that fill up, may end within a tile."""
        return self.prompts + 1 + self.tokens // PROMPT_TILE

    @property
    def parts(self) -> list[int]:
        """The numbers in each part of a graph's input, see `lay_out`."""
        return [*[self.tokens] * 2, *[self.decodes] * 2, *[self.samples] * 2, 5 * self.tiles]


def longest_step(spec: ModelSpec, ranks: int) -> int:
    """Tokens whose arithmetic takes as long as their launches: beyond them a graph saves nothing and padding costs."""
    return int(spec.layers * LAUNCH_S_PER_LAYER * FLOPS_PER_S * ranks / spec.flops_per_token())


def room_for(decodes: int) -> int | None:
    return next((room for room in DECODES if room >= decodes), None)


def size_for(plan: StepPlan, most_tokens: int) -> GraphSize | None:
    """The smallest graph that holds a plan, or None if there is none."""
    rows, decodes = plan.num_tokens, plan.counts.count(1)
    prompts = len(plan.counts) - decodes
    room = room_for(decodes)
    if room is None:
        return None
    sizes = (GraphSize(tokens, min(room, tokens)) for tokens in TOKENS if rows <= tokens <= most_tokens)
    return next((size for size in sizes if prompts <= size.prompts), None)


def lay_out(plan: StepPlan, size: GraphSize, spare_slot: int) -> list[int]:
    """A plan as the numbers that a graph of this size reads, in the order of `GraphSize.parts`.

    These are slot and position of every row; slot and position of the rows of one token; row and slot of those that
    yield a token; the tiles of the prompts. Rows that fill up are the spare slot's first token. They have tiles too:
    what they compute is not used, but it has to be numbers, or routing them to experts would spoil the others' order.
    """
    slots: list[int] = []
    positions: list[int] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
        if count > 1:
            tiles += tile_prompt(slot, len(slots), count, start)
        slots += [slot] * count
        positions += range(start, start + count)
    for row in range(len(slots), size.tokens, PROMPT_TILE):
        tiles.append((spare_slot, row, min(PROMPT_TILE, size.tokens - row), 0, 0))
    decodes = plan.counts.count(1)
    ends = zip(plan.slots, accumulate(plan.counts), plan.samples, strict=True)
    sampled = [(end - 1, slot) for slot, end, samples in ends if samples]
    columns = (
        (slots, spare_slot),
        (positions, 0),
        (plan.slots[:decodes], spare_slot),
        (plan.starts[:decodes], 0),
        ([row for row, _ in sampled], 0),
        ([slot for _, slot in sampled], spare_slot),
        (list(chain.from_iterable(tiles)), 0),
    )
    return [
        number
        for (numbers, filler), length in zip(columns, size.parts, strict=True)
        for number in numbers + [filler] * (length - len(numbers))
    ]


def run_padded(model: Decoder, batch: Batch, inputs: Tensor, size: GraphSize, drawn: bool) -> tuple[Tensor, Tensor]:
    """Scores and tokens of a plan laid out on the device; nothing here asks the host."""
    slots, positions, decode_slots, decode_positions, sampled, sampled_slots, tiles = inputs.split(size.parts)
    tokens, attention = batch.mixed_inputs(slots, positions, decode_slots, decode_positions, tiles.view(-1, 5))
    hidden = model(tokens, positions, attention, sampled)
    return score_and_keep(model, batch, hidden, sampled_slots, positions[sampled], drawn)


class PromptGraphs:
    """One graph a size, captured when first needed, for steps with prompts and the decodes beside them.

    The numbers of `lay_out` come to a fixed place in one copy. All sizes leave their scores in the same place: those of
    every size on its own would take more memory than all the rest.
    """

    def __init__(self, model: Decoder, batch: Batch, recorder: Recorder) -> None:
        self._model = model
        self._batch = batch
        self._recorder = recorder
        self._most_tokens = longest_step(model.place.spec, model.place.group.size)
        most = GraphSize(TOKENS[-1], room_for(batch.spare_slot) or DECODES[-1])
        self._scores = model.place.empty(most.samples, sum(model.head.widths))
        self._graphs: dict[tuple[GraphSize, bool], tuple[Tensor, Recorded]] = {}

    def take(self, plan: StepPlan) -> bool:
        return size_for(plan, self._most_tokens) is not None

    def run(self, plan: StepPlan, drawn: bool) -> tuple[Tensor, Tensor]:
        """Scores and tokens of the rows that yield one; the next run of any graph overwrites them."""
        size = size_for(plan, self._most_tokens)
        assert size is not None
        numbers = tensor_of(lay_out(plan, size, self._batch.spare_slot))
        if self._batch.device.type == "cuda":
            numbers = numbers.pin_memory()
        scores, tokens = self._replay(size, drawn, numbers)
        sampled = sum(plan.samples)
        return scores[:sampled], tokens[:sampled]

    def _replay(self, size: GraphSize, drawn: bool, numbers: Tensor) -> tuple[Tensor, Tensor]:
        kind = (size, drawn)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(*kind)
        inputs, recorded = self._graphs[kind]
        inputs.copy_(numbers, non_blocking=True)
        recorded.graph.replay()
        return recorded.scores, recorded.tokens

    def _capture(self, size: GraphSize, drawn: bool) -> tuple[Tensor, Recorded]:
        """With a plan of no rows: all of them are the spare slot's."""
        nothing = StepPlan(0, [], [], [], [], [], [])
        inputs = torch.tensor(lay_out(nothing, size, self._batch.spare_slot), device=self._batch.device)
        return inputs, self._recorder(lambda: self._forward(size, drawn, inputs))

    def _forward(self, size: GraphSize, drawn: bool, inputs: Tensor) -> tuple[Tensor, Tensor]:
        scores, tokens = run_padded(self._model, self._batch, inputs, size, drawn)
        return self._scores[: size.samples].copy_(scores), tokens
