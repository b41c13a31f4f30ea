"""Drafts behind a step as CUDA graphs: a head's few small layers, one after the other, take longer to launch than to
compute.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.draft_rows import Sequences
from phalanx.kernels.sampling_table import TOKEN
from phalanx.runtime.batch import Batch, StepInputs
from phalanx.runtime.drafting import Drafts, RankDrafts
from phalanx.runtime.graphs import Recorded, Recorder, graph_sizes


class DraftKind(NamedTuple):
    """Which graph: rows of the step, sequences that these are of, drafts of each, whether these are drawn or the
    likeliest.
    """

    size: int
    sequences: int
    ahead: int
    drawn: bool


COLUMNS = 8


def lay_out(plan: StepPlan, rooms: list[int], size: int, spare_slot: int) -> list[list[int]]:
    """A plan whose every sequence yields tokens, as eight columns.

    Of each row its slot, its position and the number of the token it yields, or -1; of each such token its row; of each
    sequence its slot, the positions it has room for, its first token and how many it yields. What fills up is the spare
    slot's, without room.
    """
    slots: list[int] = []
    positions: list[int] = []
    yields: list[int] = []
    wanted: list[int] = []
    for slot, start, count, samples in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True):
        slots += [slot] * count
        positions += range(start, start + count)
        yields += [-1] * (count - samples) + list(range(len(wanted), len(wanted) + samples))
        wanted += range(len(slots) - samples, len(slots))
    firsts = [end - samples for end, samples in zip(accumulate(plan.samples), plan.samples, strict=True)]
    columns = (
        (slots, spare_slot),
        (positions, 0),
        (yields, -1),
        (wanted, 0),
        (plan.slots, spare_slot),
        (rooms, 0),
        (firsts, 0),
        (plan.samples, 1),
    )
    return [column + [filler] * (size - len(column)) for column, filler in columns]


def _taking_in(size: int) -> DraftKind:
    """So many rows, without a draft."""
    return DraftKind(size, size, 0, drawn=True)


def _is_near(other: DraftKind, kind: DraftKind) -> bool:
    """Whether this graph takes hardly longer than that one would, which is then not worth a capture: a row that is cut
    where an answer ends would make one.
    """
    sizes = other.size <= 2 * kind.size and other.sequences <= 2 * kind.sequences
    return sizes and (other.ahead, other.drawn) == (kind.ahead, kind.drawn)


class DraftGraphs:
    """One graph a number of rows and of drafts, for steps whose every sequence yields tokens. Rows are taken in one by
    one: no head has a state. Where all sequences have drafts they are far fewer than rows, and all but the taking in is
    done for each sequence: for these there is another one.

    As other graphs, they are captured when first needed or stand in for each other. What the step made of its rows, and
    the tokens they yielded, are copied to a fixed place: the graph that left them may be any.
    """

    def __init__(self, drafting: RankDrafts, batch: Batch, recorder: Recorder, most: int) -> None:
        self._drafting, self._batch, self._recorder, self._most = drafting, batch, recorder, most
        self._sizes = graph_sizes(batch.spare_slot)
        self._aheads = sorted({ahead for ahead in (1, 2, 4, most) if ahead <= most})
        largest = self._sizes[-1]
        self._columns = torch.zeros(COLUMNS, largest, dtype=torch.long, device=batch.device)
        self._hidden = drafting.empty_hidden(largest).zero_()
        self._sampled = torch.zeros(largest, dtype=TOKEN, device=batch.device)
        self._graphs: dict[DraftKind, Recorded] = {}
        self.on_demand = True

    @property
    def kinds(self) -> list[DraftKind]:
        """All that may be needed, the largest first: it can stand in for any other."""
        made = [
            DraftKind(size, sequences, ahead, drawn)
            for drawn in (True, False)
            for ahead in reversed(self._aheads)
            for size in reversed(self._sizes)
            for sequences in reversed(self._sequences(size))
        ]
        return made + [_taking_in(size) for size in reversed(self._sizes)]

    def _sequences(self, size: int) -> list[int]:
        """With as many drafts as there may be of each, and without any."""
        return sorted({-(-size // (1 + self._most)), size})

    @property
    def first_kinds(self) -> list[DraftKind]:
        """Those that can stand in for all others: a step that makes no drafts does not wait for some."""
        return [kind for kind in self.kinds if kind.drawn and kind.ahead in (0, self._most)]

    def take(self, plan: StepPlan) -> bool:
        if not all(plan.samples) or plan.num_tokens > self._sizes[-1] or plan.ahead > self._most:
            return False
        return self.on_demand or bool(self._graphs)

    def _kind_for(self, plan: StepPlan) -> DraftKind:
        size = next(size for size in self._sizes if size >= plan.num_tokens)
        if not plan.ahead:
            return _taking_in(size)
        sequences = next(count for count in self._sequences(size) if count >= len(plan.slots))
        ahead = next(ahead for ahead in self._aheads if ahead >= plan.ahead)
        return DraftKind(size, sequences, ahead, self._drafting.draws(plan))

    def _stand_in(self, kind: DraftKind) -> DraftKind | None:
        """The captured graph that does best what this kind would do."""
        able = [other for other in self._graphs if all(has >= needed for has, needed in zip(other, kind, strict=True))]
        return min(able, key=lambda other: (other.ahead, other.size, other.sequences), default=None)

    def run(self, plan: StepPlan, hidden: Tensor, sampled: Tensor) -> Drafts | None:
        """`plan.ahead` drafts of each sequence; the next run of any graph overwrites them."""
        rows, of, kind = plan.num_tokens, len(plan.slots), self._kind_for(plan)
        if kind not in self._graphs:
            other = self._stand_in(kind)
            if self.on_demand and (other is None or not _is_near(other, kind)):
                self.capture(kind)
            else:
                kind = other or kind
        rooms = [self._batch.room(slot) for slot in plan.slots]
        columns = torch.tensor(lay_out(plan, rooms, kind.size, self._batch.spare_slot))
        if self._batch.device.type == "cuda":
            columns = columns.pin_memory()
        self._columns[:, : kind.size].copy_(columns, non_blocking=True)
        self._hidden[:rows].copy_(hidden[:rows])
        self._sampled[: len(sampled)].copy_(sampled)
        graph, (tokens, counts) = self._graphs[kind]
        graph.replay()
        if not plan.ahead:
            return None
        return Drafts(tokens[:of, : plan.ahead], counts[:of].clamp(max=plan.ahead))

    @torch.inference_mode()
    def capture(self, kind: DraftKind) -> None:
        if kind not in self._graphs:
            self._graphs[kind] = self._recorder(lambda: self.rehearse(kind), lambda: self._forward(kind))

    @torch.inference_mode()
    def rehearse(self, kind: DraftKind) -> tuple[Tensor, ...]:
        """Run every kernel of a graph once, with rows that touch the spare slot only."""
        nothing = StepPlan(0, [], [], [], [], [], [])
        columns = torch.tensor(lay_out(nothing, [], kind.size, self._batch.spare_slot), device=self._batch.device)
        self._columns[:, : kind.size] = columns
        return self._forward(kind)

    def _forward(self, kind: DraftKind) -> tuple[Tensor, ...]:
        slots, positions, yields, wanted = self._columns[:4, : kind.size]
        sequences = Sequences(*self._columns[4:, : kind.sequences])
        tokens, attention = self._batch.decode_inputs(slots, positions, uneven=False, apart=False)
        inputs = StepInputs(tokens, slots, positions, attention, wanted)
        sampled, hidden = self._sampled[: kind.size], self._hidden[: kind.size]
        most = min(kind.size, self._most + 1)
        made = self._drafting.make(inputs, yields, hidden, sampled, sequences, most, kind.ahead, kind.drawn, None)
        return (sampled, sequences.samples) if made is None else (made.tokens, made.counts)
