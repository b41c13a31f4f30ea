"""Short steps that hold prompts as CUDA graphs: what takes longer to launch than to compute is launched once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.tiling import PROMPT_TILE, tile_prompt
from phalanx.layers.decoder import Decoder
from phalanx.runtime.batch import Batch, News, tensor_of
from phalanx.runtime.graphs import Recorded, Recorder, Replayed, score_and_keep
from phalanx.runtime.sampler import SamplingRows
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
    return int(len(spec.layers) * LAUNCH_S_PER_LAYER * FLOPS_PER_S * ranks / spec.flops_per_token())


def room_for(decodes: int) -> int | None:
    return next((room for room in DECODES if room >= decodes), None)


def size_for(plan: StepPlan, singles: int, most_tokens: int) -> GraphSize | None:
    """The smallest graph that holds a plan whose first rows are `singles`, or None if there is none.

    Drafts that are computed like prompts yield several tokens each: what these are too many is room for decodes.
    """
    rows, prompts = plan.num_tokens, len(plan.counts) - singles
    room = room_for(max(sum(plan.counts[:singles]), sum(plan.samples) - prompts))
    if room is None:
        return None
    sizes = (GraphSize(tokens, min(room, tokens)) for tokens in TOKENS if rows <= tokens <= most_tokens)
    return next((size for size in sizes if prompts <= size.prompts and sum(plan.samples) <= size.samples), None)


def lay_out(plan: StepPlan, singles: int, size: GraphSize, spare_slot: int) -> list[int]:
    """A plan as the numbers that a graph of this size reads, in the order of `GraphSize.parts`, with a row a token.

    These are slot and position of every row; slot and position of those of `singles`; row and slot of those that
    yield a token; the tiles of the prompts. Rows that fill up are the spare slot's first token. They have tiles too:
    what they compute is not used, but it has to be numbers, or routing them to experts would spoil the others' order.
    """
    slots: list[int] = []
    positions: list[int] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
        if row >= singles:
            tiles += tile_prompt(slot, len(slots), count, start)
        slots += [slot] * count
        positions += range(start, start + count)
    for row in range(len(slots), size.tokens, PROMPT_TILE):
        tiles.append((spare_slot, row, min(PROMPT_TILE, size.tokens - row), 0, 0))
    decodes = sum(plan.counts[:singles])
    ends = zip(plan.slots, accumulate(plan.counts), plan.samples, strict=True)
    sampled = [(row, slot) for slot, end, wanted in ends for row in range(end - wanted, end)]
    columns = (
        (slots, spare_slot),
        (positions, 0),
        (slots[:decodes], spare_slot),
        (positions[:decodes], 0),
        ([row for row, _ in sampled], 0),
        ([slot for _, slot in sampled], spare_slot),
        (list(chain.from_iterable(tiles)), 0),
    )
    found: list[int] = []
    for (numbers, filler), length in zip(columns, size.parts, strict=True):
        found += numbers
        found += [filler] * (length - len(numbers))
    return found


def run_padded(
    model: Decoder, batch: Batch, inputs: Tensor, size: GraphSize, drawn: bool, cut: Callable[[], None] | None = None
) -> Replayed:
    """Scores and tokens of a plan laid out on the device; nothing here asks the host. A head that drafts takes in what
    the model made of all rows.
    """
    slots, positions, decode_slots, decode_positions, sampled, sampled_slots, tiles = inputs.split(size.parts)
    tokens, attention = batch.mixed_inputs(slots, positions, decode_slots, decode_positions, tiles.view(-1, 5))
    all_rows = model.draft_head is not None
    hidden = model(tokens, positions, attention, None if all_rows else sampled, cut=cut)
    looked_at = hidden[sampled] if all_rows else hidden
    scores, sampled_tokens, _ = score_and_keep(model, batch, looked_at, sampled_slots, positions[sampled], drawn)
    return scores, sampled_tokens, hidden


class PromptKind(NamedTuple):
    """Which graph: what it has room for, and whether tokens are drawn or the likeliest."""

    size: GraphSize
    drawn: bool


class PromptGraphs:
    """One graph a size, for steps of up to `tokens` tokens with prompts and the decodes beside them.

    As decode graphs, they are captured when first needed or stand in for each other; a step for which none is captured
    is launched kernel by kernel. The numbers of `lay_out` come to a fixed place in one copy. All sizes leave their
    scores in the same place: those of every size on its own would take more memory than all the rest.
    """

    def __init__(self, model: Decoder, batch: Batch, recorder: Recorder, tokens: int) -> None:
        self._model = model
        self._sketch = model.sketch()
        self._batch = batch
        self._recorder = recorder
        self._most_tokens = longest_step(model.place.spec, model.place.group.size)
        longest = next((size for size in TOKENS if size >= tokens), TOKENS[-1])
        self._tokens = [size for size in TOKENS if size <= min(longest, self._most_tokens)]
        most = room_for(batch.spare_slot) or DECODES[-1]
        self._rooms = [room for room in DECODES if room <= most]
        self._scores = model.place.empty(GraphSize(TOKENS[-1], most).samples, sum(model.head.widths))
        self._graphs: dict[PromptKind, tuple[Tensor, Recorded]] = {}
        self.on_demand = True

    @property
    def kinds(self) -> list[PromptKind]:
        """All that may be needed, the largest first: it can stand in for any other."""
        sizes = {GraphSize(tokens, min(room, tokens)) for tokens in self._tokens for room in self._rooms}
        return [PromptKind(size, drawn) for drawn in (True, False) for size in sorted(sizes, reverse=True)]

    @property
    def first_kinds(self) -> list[PromptKind]:
        """Those that can stand in for all others, as of decode graphs."""
        return [kind for kind in self.kinds if kind.drawn]

    def take(self, plan: StepPlan) -> bool:
        if not (self.on_demand or self._graphs):
            return False
        return size_for(plan, self._batch.singles(plan), self._most_tokens) is not None

    def _stand_in(self, kind: PromptKind) -> PromptKind | None:
        """The smallest captured graph that does what this kind would do."""
        able = [
            other
            for other in self._graphs
            if other.size.tokens >= kind.size.tokens
            and other.size.decodes >= kind.size.decodes
            and other.drawn >= kind.drawn
        ]
        return min(able, default=None)

    def run(self, plan: StepPlan, rows: SamplingRows, news: News) -> Replayed:
        """Scores and tokens of the rows that yield one; the next run of any graph overwrites them."""
        self._batch.take_in(news)
        singles = self._batch.singles(plan)
        size = size_for(plan, singles, self._most_tokens)
        assert size is not None
        kind = PromptKind(size, rows.drawn)
        if kind not in self._graphs:
            if self.on_demand:
                self.capture(kind)
            else:
                kind = self._stand_in(kind) or kind
        numbers = tensor_of(lay_out(plan, singles, kind.size, self._batch.spare_slot))
        if self._batch.device.type == "cuda":
            numbers = numbers.pin_memory()
        inputs, (graph, (scores, tokens, hidden)) = self._graphs[kind]
        inputs.copy_(numbers, non_blocking=True)
        graph.replay()
        sampled = len(rows)
        made = sampled if self._model.draft_head is None else plan.num_tokens
        return scores[:sampled], tokens[:sampled], hidden[:made]

    @torch.inference_mode()
    def capture(self, kind: PromptKind) -> None:
        if kind not in self._graphs:
            inputs = self._padding(kind.size)
            recorded = self._recorder(
                lambda: self._forward(self._sketch, kind, inputs), lambda: self._forward(self._model, kind, inputs)
            )
            self._graphs[kind] = inputs, recorded

    @torch.inference_mode()
    def rehearse(self, kind: PromptKind) -> Replayed:
        """Run every kernel of a graph once."""
        return self._forward(self._sketch, kind, self._padding(kind.size))

    def _padding(self, size: GraphSize) -> Tensor:
        """A plan of no rows: all of them are the spare slot's."""
        nothing = StepPlan(0, [], [], [], [], [], [])
        return torch.tensor(lay_out(nothing, 0, size, self._batch.spare_slot), device=self._batch.device)

    def _forward(self, model: Decoder, kind: PromptKind, inputs: Tensor) -> Replayed:
        scores, tokens, hidden = run_padded(model, self._batch, inputs, kind.size, kind.drawn, self._recorder.cut)
        return self._scores[: kind.size.samples].copy_(scores), tokens, hidden
