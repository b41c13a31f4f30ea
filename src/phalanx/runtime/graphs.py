"""Decode steps as CUDA graphs: the whole model in one launch."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.engine.step_plan import StepPlan
from phalanx.fabric.group import Group
from phalanx.kernels.lookup import TARGETS, keep_sampled
from phalanx.kernels.sampling import draw, flag_broken, likeliest
from phalanx.kernels.tiling import is_uneven
from phalanx.layers.decoder import Decoder
from phalanx.runtime.batch import Batch, News
from phalanx.runtime.sampler import SamplingRows


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture: small ones close together, then every 16."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most})


class GraphInParts(torch.cuda.CUDAGraph):
    """A graph that may be cut while it is recorded: a GPU begins a graph when all of it is launched, which takes the
    host long. Of one in parts it computes the first ones meanwhile.
    """

    def capture_begin(self, *where: Any, **how: Any) -> None:
        self._where, self._how = where, how
        self._rest: list[torch.cuda.CUDAGraph] = []
        super().capture_begin(*where, **how)

    def cut(self) -> None:
        self.capture_end()
        self._rest.append(torch.cuda.CUDAGraph())
        self._rest[-1].capture_begin(*self._where, **self._how)

    def capture_end(self) -> None:
        if self._rest:
            self._rest[-1].capture_end()
        else:
            super().capture_end()

    def replay(self) -> None:
        super().replay()
        for part in self._rest:
            part.replay()


class Recorded(NamedTuple):
    """A graph and where each replay leaves its results."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, ...]


Replayed = tuple[Tensor, Tensor, Tensor]
"""Scores, tokens and what the model made of the rows."""
GraphBody = Callable[[], tuple[Tensor, ...]]


class Recorder:
    """Captures graphs that share one memory: they run one after the other.

    A graph may use the place of another one's results. So results last until the next replay of any graph: what reads
    them must be queued before it. The largest graph had better be the first: the others then need no memory of their
    own.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._recorded: GraphInParts | None = None
        self.captured = 0

    @cached_property
    def _memory(self) -> torch.cuda._POOL_HANDLE:
        return torch.cuda.graph_pool_handle()

    def __call__(self, rehearse: GraphBody, run: GraphBody) -> Recorded:
        """Rehearse, so that every kernel is there, then record."""
        self.captured += 1
        rehearse()
        self._group.wait_for(torch.cuda.current_stream().record_event())
        self._recorded = graph = GraphInParts()
        # NCCL looks after its collectives from a thread of its own: only this thread's calls may break the capture.
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                results = run()
        finally:
            self._recorded = None
        return Recorded(graph, tuple(map(unowned, results)))

    def cut(self) -> None:
        """What follows becomes a part of its own, if a graph is being recorded."""
        if self._recorded is not None:
            self._recorded.cut()


class _Memory:
    """Some bytes of a device, in the words that libraries pass them on by."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def unowned(tensor: Tensor) -> Tensor:
    """The same place on the device, which does not count as taken for it: a graph recorded later may use it too."""
    assert tensor.is_contiguous()
    found = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return found.view(tensor.dtype).view(tensor.shape)


def score_and_keep(
    model: Decoder, batch: Batch, hidden: Tensor, slots: Tensor, positions: Tensor, drawn: bool
) -> Replayed:
    """Scores of these rows, and their tokens: drawn by the parameters of their slots, or the likeliest ones; and what
    these were made of.

    The tokens go into the pool, behind the rows' own positions.
    """
    scores = model.scores(hidden)
    after = positions + 1
    tokens = draw(scores, batch.sampling, slots, after) if drawn else likeliest(scores)
    keep_sampled(batch.tokens, slots, after, tokens)
    return scores, flag_broken(tokens, scores), hidden


class GraphKind(NamedTuple):
    """Which decode graph: how many rows, whether tokens are drawn or the likeliest, whether lengths are uneven, whether
    each row is known to be the only one of its sequence.
    """

    size: int
    drawn: bool
    uneven: bool
    apart: bool = False


class _Inbox(NamedTuple):
    """Where a graph of so many rows finds what a step brings: slots, positions, and news as `take_in` reads them."""

    size: int

    @property
    def width(self) -> int:
        """Of slots and of positions: each begins where kernels can read two words at once."""
        return self.size + self.size % 2

    @property
    def room(self) -> int:
        """For so many news: of a sequence they are a token, that it is known, and seldom a block of every group."""
        return 16 + 4 * self.size

    @property
    def end(self) -> int:
        return 2 * self.width + TARGETS + 2 * self.room


class DecodeGraphs:
    """One graph a batch size; a batch runs in the next larger one. Batches of uneven lengths have their own, and where
    states can go back to before drafts, which takes time, those without drafts.

    With `on_demand`, a graph is captured when it is first needed. Otherwise no step waits for that: until a graph is
    captured, another one stands in for it. One that draws tokens serves greedy rows too, one for equal lengths uneven
    ones and one for drafts those without, if slowly. All ranks must agree on the graph, for to capture one they talk:
    what a rank holds more than another does not count.

    A graph reads slots and positions from fixed buffers, gathers tokens and block tables by them on the device, and
    leaves the scores in a fixed place until the next replay. It also puts tokens into the token pool: the likeliest
    ones, or, in a graph of its own, those drawn by the parameters of their slots. Rows beyond the batch point at the
    spare slot, which is greedy.

    Where a step is read before the next one is launched, the GPU has nothing to do meanwhile, and the host is `hasty`:
    graphs are recorded in parts, and take in what is new themselves. With two steps on their way, which have little
    that is new, there is time for that.
    """

    def __init__(self, model: Decoder, batch: Batch, hasty: bool = False) -> None:
        self._model = model
        self._sketch = model.sketch()
        self._batch = batch
        self._hasty = hasty
        self._sizes = graph_sizes(batch.spare_slot)
        self._inbox = torch.zeros(_Inbox(self._sizes[-1]).end, dtype=torch.int64, device=batch.device)
        spec = model.place.spec
        self._kv_heads = -(-spec.kv_heads // model.place.group.size)
        self._ways_apart = (False, True) if spec.has_states and spec.goes_back else (False,)
        self._graphs: dict[GraphKind, Recorded] = {}
        self.on_demand = True
        self.recorder = Recorder(model.place.group)

    @staticmethod
    def serve(model: Decoder) -> bool:
        """Whether this model can be captured: on a GPU, with parts and ranks that need no host."""
        return model.place.device.type == "cuda" and model.place.group.in_graphs and model.in_graphs

    @property
    def kinds(self) -> list[GraphKind]:
        """All that may be needed, the largest first: it can stand in for any other."""
        ways = product((True, False), self._ways_apart, (False, True))
        return [
            GraphKind(size, drawn, uneven, apart) for drawn, apart, uneven in ways for size in reversed(self._sizes)
        ]

    @property
    def first_kinds(self) -> list[GraphKind]:
        """Those that can stand in for all others: where tokens are drawn, the likeliest are for greedy rows."""
        return [kind for kind in self.kinds if kind.drawn and not kind.apart]

    def take(self, plan: StepPlan) -> bool:
        """Whether all tokens of this step yield one, each on its own, and there is a graph for so many, or will be."""
        if plan.samples != plan.counts or self._batch.singles(plan) < len(plan.counts):
            return False
        return plan.num_tokens <= self._sizes[-1] and (self.on_demand or bool(self._graphs))

    def _kind_for(self, plan: StepPlan, rows: SamplingRows) -> GraphKind:
        lengths = rows.positions
        size = next(size for size in self._sizes if size >= len(lengths))
        apart = self._ways_apart[-1] and len(lengths) == len(plan.slots)
        return GraphKind(size, rows.drawn, is_uneven(lengths + [1] * (size - len(lengths)), self._kv_heads), apart)

    def _stand_in(self, kind: GraphKind) -> GraphKind | None:
        """The captured graph that does best what this kind would do."""

        def is_able(other: GraphKind) -> bool:
            return other.size >= kind.size and other.drawn >= kind.drawn and other.apart <= kind.apart

        def how_far(other: GraphKind) -> tuple[bool, int, bool, bool]:
            return other.uneven != kind.uneven, other.size, other.apart != kind.apart, other.drawn

        return min(filter(is_able, self._graphs), key=how_far, default=None)

    def run(self, plan: StepPlan, rows: SamplingRows, news: News) -> Replayed:
        """Scores, tokens and hidden states of a plan that they take; the next run overwrites them."""
        kind = self._kind_for(plan, rows)
        if kind not in self._graphs:
            if self.on_demand:
                self.capture(kind)
            else:
                kind = self._stand_in(kind) or kind
        inbox = _Inbox(kind.size)
        if not self._hasty or len(news) > inbox.room:
            self._batch.take_in(news)
            news = News()
        self._put(inbox, rows.slots, [after - 1 for after in rows.positions], news)
        graph, (scores, tokens, hidden) = self._graphs[kind]
        graph.replay()
        count = len(rows)
        return scores[:count], tokens[:count], hidden[:count]

    def _put(self, inbox: _Inbox, slots: list[int], positions: list[int], news: News) -> None:
        """All that a graph reads, in one copy that nobody waits for."""
        padding = inbox.width - len(slots)
        words = array("q", slots + [self._batch.spare_slot] * padding + positions + [0] * padding) + news.words()
        found = torch.frombuffer(words, dtype=torch.int64)
        if self._batch.device.type == "cuda":
            found = found.pin_memory()
        self._inbox[: len(words)].copy_(found, non_blocking=True)

    @torch.inference_mode()
    def capture(self, kind: GraphKind) -> None:
        if kind not in self._graphs:
            self._graphs[kind] = self.recorder(lambda: self.rehearse(kind), lambda: self._forward(self._model, kind))

    @torch.inference_mode()
    def rehearse(self, kind: GraphKind) -> Replayed:
        """Run every kernel of a graph once, with rows that touch the spare slot only."""
        self._put(_Inbox(kind.size), [], [], News())
        return self._forward(self._sketch, kind)

    def _forward(self, model: Decoder, kind: GraphKind) -> Replayed:
        inbox = _Inbox(kind.size)
        slots, positions = (self._inbox[first : first + kind.size] for first in (0, inbox.width))
        if self._hasty:
            self._batch.take_in_sent(self._inbox[2 * inbox.width : inbox.end], inbox.room)
        tokens, attention = self._batch.decode_inputs(slots, positions, kind.uneven, kind.apart)
        hidden = model(tokens, positions, attention, cut=self.recorder.cut if self._hasty else None)
        return score_and_keep(model, self._batch, hidden, slots, positions, kind.drawn)
