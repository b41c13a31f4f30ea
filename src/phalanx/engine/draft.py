"""A step being planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from phalanx.engine.masks import MaskBook
from phalanx.engine.request import Request
from phalanx.engine.step_plan import Admission, StepPlan

_slot = attrgetter("slot")


@dataclass
class Draft:
    """The step being planned. `decodes` compute their last token each, `starts` says where; `prompts` are (request,
    start, count); `blocks` those that some of them got. `constrained`: whether one of them is under a grammar. The rest
    is as in `StepPlan`.
    """

    admissions: list[Admission] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prompts: list[tuple[Request, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    window_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    constrained: bool = False

    def give(self, slot: int, groups: list[list[int]]) -> None:
        """Blocks of each group that a slot gets, behind those it has."""
        self.blocks.append((slot, groups[0]))
        for group, blocks in enumerate(groups[1:]):
            self.window_blocks.append((slot, group, [max(0, block) for block in blocks]))

    def to_plan(self, step: int, masks: MaskBook) -> tuple[StepPlan, list[Request]]:
        """The plan, and the requests it samples a token of."""
        prompts = sorted(self.prompts, key=lambda row: row[2] != 1)
        ends = [start + count == len(request.tokens) for request, start, count in prompts]
        samples = [True] * len(self.decodes) + ends
        requests = self.decodes + [request for request, _, _ in prompts]
        plan = StepPlan(
            step=step,
            admissions=self.admissions,
            slots=list(map(_slot, requests)),
            starts=self.starts + [start for _, start, _ in prompts],
            counts=[1] * len(self.decodes) + [count for _, _, count in prompts],
            samples=samples,
            new_blocks=self.blocks,
            masks=[
                (index, masks.place(request.matcher.mask()))
                for index, (request, sampled) in enumerate(zip(requests, samples, strict=True))
                if request.matcher is not None and sampled
            ]
            if self.constrained
            else [],
            new_masks=masks.take_new(),
            window_blocks=self.window_blocks,
            restored=self.restored,
            saved=self.saved,
        )
        return plan, self.decodes + [row[0] for row, end in zip(prompts, ends, strict=True) if end]
