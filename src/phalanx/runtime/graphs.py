"""Decode steps as CUDA graphs: the whole model in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.engine.plan import StepPlan
from phalanx.kernels.sampling import likeliest
from phalanx.models.decoder import Decoder
from phalanx.runtime.batch import Batch


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture: small ones close together, then every 16."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """One graph a batch size, captured when first needed; a batch runs in the next larger one.

    A graph reads slots and positions from fixed buffers, gathers tokens and block tables by them on the device, and
    leaves the scores in a fixed place until the next replay. It also puts the likeliest tokens into the token pool,
    which is all that greedy requests need. Rows beyond the batch point at the spare slot.
    """

    def __init__(self, model: Decoder, batch: Batch) -> None:
        self._model = model
        self._batch = batch
        self._sizes = graph_sizes(batch.spare_slot)
        self._slots = torch.full((self._sizes[-1],), batch.spare_slot, device=batch.device)
        self._positions = torch.zeros_like(self._slots)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @staticmethod
    def serve(model: Decoder) -> bool:
        """Whether this model can be captured: on a GPU, with ranks that talk on its queue."""
        return model.place.device.type == "cuda" and model.place.group.in_graphs

    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Scores and likeliest tokens of a plan whose rows have one token each; the next run overwrites them."""
        rows = len(plan.slots)
        size = next(size for size in self._sizes if size >= rows)
        padding = size - rows
        where = torch.tensor(
            [plan.slots + [self._batch.spare_slot] * padding, plan.starts + [0] * padding], pin_memory=True
        )
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        self._slots[:size].copy_(where[0], non_blocking=True)
        self._positions[:size].copy_(where[1], non_blocking=True)
        graph, scores, tops = self._graphs[size]
        graph.replay()
        return scores[:rows], tops[:rows]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Run once so that every kernel is compiled, then record. Both runs touch the spare slot only."""
        self._slots[:size] = self._batch.spare_slot
        self._positions[:size] = 0
        self._forward(size)
        self._model.place.group.wait_for(torch.cuda.current_stream().record_event())
        graph = torch.cuda.CUDAGraph()
        # NCCL looks after its collectives from a thread of its own: only this thread's calls may break the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            scores, tops = self._forward(size)
        return graph, scores, tops

    def _forward(self, size: int) -> tuple[Tensor, Tensor]:
        slots, positions = self._slots[:size], self._positions[:size]
        tokens, attention = self._batch.decode_inputs(slots, positions)
        scores = self._model.scores(self._model(tokens, positions, attention))
        tops = likeliest(scores)
        self._batch.tokens[slots, positions + 1] = tops
        return scores, tops
