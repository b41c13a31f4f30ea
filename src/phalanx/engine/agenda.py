"""A step being planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from phalanx.engine.masks import MaskBook
from phalanx.engine.request import Request
from phalanx.engine.step_plan import Admission, StepPlan

_slot = attrgetter("slot")


class Drafted(NamedTuple):
    """A row that ends with drafts: where it begins, how many tokens it has, and, under a grammar, what each token that
    it yields may be.
    """

    request: Request
    start: int
    tokens: int
    drafts: list[int]
    masks: Sequence[bytes]


@dataclass
class Agenda:
    """The step being planned. `decodes` compute their last token each, `starts` says where; `prompts` are (request,
    start, count); `blocks` those that slots got, `window_blocks` by slot and group. `constrained`: whether one of them
    is under a grammar. The rest is as in `StepPlan`.
    """

    admissions: list[Admission] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    prompts: list[tuple[Request, int, int]] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    window_blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    restored: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    told: list[tuple[int, int, list[int]]] = field(default_factory=list)
    constrained: bool = False
    ahead: int = 0
    taken_in: bool = False
    drafts_stay: bool = False
    reread: bool = False

    def give(self, slot: int, groups: list[list[int]]) -> None:
        """Blocks of each group that a slot gets, behind those it has."""
        if groups[0]:
            self.blocks.setdefault(slot, []).extend(groups[0])
        for group, blocks in enumerate(groups[1:]):
            if blocks:
                self.window_blocks.setdefault((slot, group), []).extend(max(0, block) for block in blocks)

    @property
    def decoding(self) -> list[Request]:
        """Those that yield tokens in this step."""
        ended = [request for request, start, count in self.prompts if start + count == len(request.tokens)]
        return self.decodes + [row.request for row in self.drafted] + ended

    @property
    def tokens(self) -> int:
        """That the step computes so far."""
        return len(self.decodes) + sum(row.tokens for row in self.drafted) + sum(count for _, _, count in self.prompts)

    def to_plan(self, step: int, masks: MaskBook) -> tuple[StepPlan, list[Request]]:
        """The plan, and the requests whose rows yield a token, or one more than they have drafts."""
        ends: dict[bool, list[tuple[Request, int, int, int]]] = {True: [], False: []}
        for row in self.prompts:
            ends[row[2] == 1].append((*row, int(row[1] + row[2] == len(row[0].tokens))))
        drafted = [(row.request, row.start, row.tokens, 1 + len(row.drafts)) for row in self.drafted]
        drafted.sort(key=lambda row: row[3] == 1)
        behind = [*ends[True], *drafted, *ends[False]]
        sampled = self.decodes + [row[0] for row in behind if row[3]]
        plan = StepPlan(
            step=step,
            admissions=self.admissions,
            slots=list(map(_slot, self.decodes + [row[0] for row in behind])),
            starts=self.starts + [row[1] for row in behind],
            counts=[1] * len(self.decodes) + [row[2] for row in behind],
            samples=[1] * len(self.decodes) + [row[3] for row in behind],
            new_blocks=list(self.blocks.items()),
            masks=self._masks(sampled, masks) if self.constrained else [],
            new_masks=masks.take_new(),
            window_blocks=[(slot, group, blocks) for (slot, group), blocks in self.window_blocks.items()],
            restored=self.restored,
            saved=self.saved,
            told=self.told,
            ahead=self.ahead,
            taken_in=self.taken_in,
            drafts_stay=self.drafts_stay,
            reread=self.reread,
        )
        return plan, sampled

    def _masks(self, sampled: list[Request], book: MaskBook) -> list[tuple[int, int]]:
        """What the tokens that are yielded may be, where a grammar has a say: their numbers, and places of masks."""
        drafted = {row.request.id: row for row in self.drafted}
        places, number = [], 0
        for request in sampled:
            row = drafted.get(request.id)
            if request.matcher is not None:
                allowed = row.masks if row else [request.matcher.mask()]
                places += [(number + index, book.place(mask)) for index, mask in enumerate(allowed)]
            number += 1 + len(row.drafts) if row else 1
        return places


class Launched(NamedTuple):
    """A step on its way, the requests of its rows that yield tokens, and its rows of drafts."""

    plan: StepPlan
    sampled: list[Request]
    drafted: list[Drafted]

    @property
    def decodes(self) -> bool:
        """Whether all its rows go on with answers, with drafts or without."""
        plan = self.plan
        return (
            not plan.admissions and all(plan.samples) and plan.counts.count(1) + len(self.drafted) == len(plan.counts)
        )
