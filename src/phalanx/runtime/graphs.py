"""Decode steps as CUDA graphs: the whole model in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engine.plan import StepPlan
from phalanx.fabric.group import Group
from phalanx.kernels.attention import is_uneven
from phalanx.kernels.sampling import draw, likeliest
from phalanx.models.decoder import Decoder
from phalanx.runtime.batch import Batch


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture: small ones close together, then every 16."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class Recorded(NamedTuple):
    """A graph and where each replay leaves scores and tokens."""

    graph: torch.cuda.CUDAGraph
    scores: Tensor
    tokens: Tensor


class Recorder:
    """Captures graphs that share one memory: they run one after the other.

    A graph may use the place of another one's results. So results last until the next replay of any graph: what reads
    them must be queued before it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @cached_property
    def _memory(self) -> torch.cuda._POOL_HANDLE:
        return torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], tuple[Tensor, Tensor]]) -> Recorded:
        """Run once so that every kernel is compiled, then record."""
        run()
        self._group.wait_for(torch.cuda.current_stream().record_event())
        graph = torch.cuda.CUDAGraph()
        # NCCL looks after its collectives from a thread of its own: only this thread's calls may break the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            scores, tokens = run()
        return Recorded(graph, scores, tokens)


def score_and_keep(
    model: Decoder, batch: Batch, hidden: Tensor, slots: Tensor, positions: Tensor, drawn: bool
) -> tuple[Tensor, Tensor]:
    """Scores of these rows, and their tokens: drawn by the parameters of their slots, or the likeliest ones.

    The tokens go into the pool, behind the rows' own positions.
    """
    scores = model.scores(hidden)
    after = positions + 1
    tokens = draw(scores, batch.sampling, slots, after) if drawn else likeliest(scores)
    batch.tokens[slots, after] = tokens
    return scores, tokens


class _Kind(NamedTuple):
    size: int
    drawn: bool
    uneven: bool


class DecodeGraphs:
    """One graph a batch size, captured when first needed; a batch runs in the next larger one.

    Batches of uneven lengths have their own. All ranks must agree on the graph, for to capture one they talk: what a
    rank holds more than another does not count.

    A graph reads slots and positions from fixed buffers, gathers tokens and block tables by them on the device, and
    leaves the scores in a fixed place until the next replay. It also puts tokens into the token pool: the likeliest
    ones, or, in a graph of its own, those drawn by the parameters of their slots. Rows beyond the batch point at the
    spare slot, which is greedy.
    """

    def __init__(self, model: Decoder, batch: Batch) -> None:
        self._model = model
        self._batch = batch
        self._sizes = graph_sizes(batch.spare_slot)
        self._slots = torch.full((self._sizes[-1],), batch.spare_slot, device=batch.device)
        self._positions = torch.zeros_like(self._slots)
        self._kv_heads = -(-model.place.spec.kv_heads // model.place.group.size)
        self._graphs: dict[_Kind, Recorded] = {}
        self.recorder = Recorder(model.place.group)

    @staticmethod
    def serve(model: Decoder) -> bool:
        """Whether this model can be captured: on a GPU, with ranks that talk on its queue."""
        return model.place.device.type == "cuda" and model.place.group.in_graphs

    def run(self, plan: StepPlan, drawn: bool) -> tuple[Tensor, Tensor]:
        """Scores and tokens of a plan whose rows have one token each; the next run overwrites them."""
        rows = len(plan.slots)
        size = next(size for size in self._sizes if size >= rows)
        slots = plan.slots + [self._batch.spare_slot] * (size - rows)
        starts = plan.starts + [0] * (size - rows)
        where = torch.tensor([slots, starts], pin_memory=self._batch.device.type == "cuda")
        kind = _Kind(size, drawn, is_uneven(starts, self._kv_heads))
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(kind)
        self._slots[:size].copy_(where[0], non_blocking=True)
        self._positions[:size].copy_(where[1], non_blocking=True)
        graph, scores, tokens = self._graphs[kind]
        graph.replay()
        return scores[:rows], tokens[:rows]

    def _capture(self, kind: _Kind) -> Recorded:
        """With rows that touch the spare slot only."""
        self._slots[: kind.size] = self._batch.spare_slot
        self._positions[: kind.size] = 0
        return self.recorder(lambda: self._forward(kind))

    def _forward(self, kind: _Kind) -> tuple[Tensor, Tensor]:
        slots, positions = self._slots[: kind.size], self._positions[: kind.size]
        tokens, attention = self._batch.decode_inputs(slots, positions, kind.uneven)
        hidden = self._model(tokens, positions, attention)
        return score_and_keep(self._model, self._batch, hidden, slots, positions, kind.drawn)
