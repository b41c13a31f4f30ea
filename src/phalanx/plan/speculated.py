"""Steps that compute drafts: what a token of every row takes with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from phalanx.engine.step_sums import StepSums
from phalanx.plan.simulate import StepPrice
from phalanx.spec.model import ModelSpec


def drafting_part(spec: ModelSpec) -> ModelSpec | None:
    """What makes one draft, as a model: the layer of the head between embedding and head. None: drafts cost nothing."""
    head = spec.draft_head
    return None if head is None else dataclasses.replace(spec, layers=(head.layer,), head=None, drafts=False)


def tokens_of_row(drafts: int, acceptance: float) -> float:
    """That stand of a row, on average, where each draft comes true with this chance if those before it did."""
    return sum(acceptance**number for number in range(drafts + 1))


@dataclass(frozen=True)
class SpeculativePrice:
    """A simulated step gives every row that decodes one token. With drafts, a real one gives it several: so a row's
    part of a step is what the longer one takes, and the making of its drafts, by the tokens that stand of it.

    An engine makes as many drafts as pay, up to `most`: at large batches none.
    """

    price: StepPrice
    draft_price: StepPrice
    acceptance: float
    most: int

    def __call__(self, step: StepSums) -> float:
        if not step.decodes:
            return self.price(step)
        prompts = StepSums(0, 0, step.prompt_tokens, step.prompt_pairs, step.prompts)
        alone = self.price(prompts) if step.prompt_tokens else 0.0
        return min(
            alone + (self._verify(step, drafts) - alone) / tokens_of_row(drafts, self.acceptance)
            for drafts in range(self.most + 1)
        )

    def _verify(self, step: StepSums, drafts: int) -> float:
        """A step whose rows have so many drafts, and the making of as many: the first with the rows it takes in."""
        rows = StepSums(
            step.decodes * (1 + drafts),
            (1 + drafts) * (step.context + step.decodes * drafts / 2),
            step.prompt_tokens,
            step.prompt_pairs,
            step.prompts,
        )
        taken_in = self.draft_price(rows) if drafts else 0.0
        further = self.draft_price(StepSums(step.decodes, step.context)) if drafts > 1 else 0.0
        return self.price(rows) + taken_in + max(0, drafts - 1) * further
