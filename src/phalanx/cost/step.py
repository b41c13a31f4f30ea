"""Step: all that the price of a step depends on."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """A step by its sums. Decodes: rows of one token and the positions they look at, in all. Prompts: tokens computed
    and pairs of positions that attend to each other. `repeats` such steps come in a row, `context` being their mean.
    """

    decodes: int
    context: float
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    prompts: int = 0
    repeats: int = 1

    @classmethod
    def of(cls, plan: StepPlan) -> Step:
        """The sums of a plan, whose rows of one token come first."""
        decodes = sum(count == 1 for count in plan.counts)
        context = sum(plan.starts[:decodes]) + decodes
        rows = list(zip(plan.starts[decodes:], plan.counts[decodes:], strict=True))
        pairs = sum(count * (start + (count + 1) / 2) for start, count in rows)
        return cls(decodes, context, sum(count for _, count in rows), pairs, len(rows))

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens
