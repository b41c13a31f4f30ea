"""StepSums: a step by its sums, which is all that its time depends on."""

from __future__ import annotations

import msgspec


class StepSums(msgspec.Struct, array_like=True, gc=False):
    """Decodes: rows of one token, whatever they compute, and the positions they look at, in all. Prompts: tokens
    computed and pairs of positions that attend to each other, in how many rows.
    """

    decodes: int = 0
    context: float = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    prompts: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    def add_row(self, start: int, count: int) -> None:
        """A row of `count` tokens from position `start` on."""
        if count == 1:
            self.decodes += 1
            self.context += start + 1
            return
        self.prompts += 1
        self.prompt_tokens += count
        self.prompt_pairs += count * (start + (count + 1) / 2)

    def add_drafts(self, start: int, count: int) -> None:
        """A row of `count` tokens that are computed one by one."""
        self.decodes += count
        self.context += count * (start + (count + 1) / 2)

    def add(self, other: StepSums) -> None:
        self.decodes += other.decodes
        self.context += other.context
        self.prompt_tokens += other.prompt_tokens
        self.prompt_pairs += other.prompt_pairs
        self.prompts += other.prompts
