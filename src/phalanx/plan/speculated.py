"""Steps that compute drafts: what a token of every row takes with them."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from phalanx.cost.work import RankWork, count_work
from phalanx.engine.step_sums import StepSums
from phalanx.plan.simulate import StepPrice
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec


def drafting_part(spec: ModelSpec) -> ModelSpec | None:
    """What makes one draft, as a model: the layer of the head between embedding and head. None: drafts cost nothing."""
    head = spec.draft_head
    return None if head is None else dataclasses.replace(spec, layers=(head.layer,), head=None, drafts=False)


@lru_cache(maxsize=512)
def drafting_work(spec: ModelSpec, tp: int, weights: str, kv: str, capability: str) -> RankWork | None:
    """What a rank does for one draft. On GPUs of this compute capability it reads a copy of the head in fewer bits."""
    part = drafting_part(spec)
    if part is None:
        return None
    work = count_work(part, tp, weights, kv)
    narrow = Layout(spec.in_format(weights), tp).narrow_head_bytes(0, capability)
    return dataclasses.replace(work, head_bytes=narrow) if narrow else work


def published_acceptance(model_type: str) -> tuple[float, str]:
    """The chance that a draft of this family's head comes true, from the tokens that stood of a row with so many
    drafts, and who says so; of a family that nobody published, the least of those that were.
    """
    known = _published()
    named = next((each for each in known if model_type == each["family"]), None)
    told = named or min(known, key=lambda each: float(each["tokens"]))
    said = f"{told['tokens']} tokens of {told['drafts']} drafts, {told['source']}"
    return _chance(told["drafts"], told["tokens"]), said if named else f"{said}, for want of {model_type}'s"


@cache
def _published() -> list[dict[str, Any]]:
    text = (files("phalanx.plan") / "acceptance.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["head"])


def _chance(drafts: int, tokens: float) -> float:
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of_row(drafts, middle) < tokens else (low, middle)
    return round(low, 3)


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
