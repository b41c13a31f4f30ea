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
        """The sums of a plan."""
        sums = plan.sums()
        return cls(sums.decodes, sums.context, sums.prompt_tokens, sums.prompt_pairs, sums.prompts)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens
