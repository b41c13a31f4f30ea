"""Log-probabilities: of the tokens that are chosen, and of a prompt's own."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of a token, and of the likeliest ones, best first.

    Of a prompt's token, `rank` is its own place among all, from 1 on.
    """

    sampled: float
    top: list[tuple[int, float]]
    rank: int = 0


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of a prompt's tokens from position `start` on, `width` numbers each.

    `values` are log-probabilities in float32: the token's own, then those of the likeliest. `tokens` are int32: the
    token's rank, then which ones those likeliest are. They stay packed on their way: as objects, those of a long
    prompt would take twenty times as much.
    """

    start: int
    width: int
    values: bytes = b""
    tokens: bytes = b""

    def __len__(self) -> int:
        return len(self.values) // (4 * self.width)

    @property
    def end(self) -> int:
        return self.start + len(self)

    def extended(self, part: PromptLogprobs) -> PromptLogprobs:
        """With a part that begins at its end or before; what is known already is left out."""
        assert part.start <= self.end, f"what begins at {part.start} does not follow what ends at {self.end}"
        known = 4 * self.width * (self.end - part.start)
        return PromptLogprobs(
            self.start, self.width, self.values + part.values[known:], self.tokens + part.tokens[known:]
        )

    def __iter__(self) -> Iterator[TokenLogprobs]:
        values, tokens = memoryview(self.values).cast("f"), memoryview(self.tokens).cast("i")
        for first in range(0, len(values), self.width):
            last = first + self.width
            likeliest = zip(tokens[first + 1 : last], values[first + 1 : last], strict=True)
            yield TokenLogprobs(values[first], list(likeliest), tokens[first])
