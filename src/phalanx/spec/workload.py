"""Workload: who asks for what, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from phalanx.errors import PhalanxError

TYPICAL_ARRIVALS = 3591
"""Of 4,000 seeds the one whose first 800 to 12,000 arrivals are most like Poisson arrivals without end: they keep a
queue with one server at 70 to 90 % load within a tenth of its theoretical mean. So short runs say what long ones do."""


class WorkloadError(PhalanxError):
    """The traffic is described wrongly."""


@dataclass(frozen=True)
class Workload:
    """Traffic: a closed loop of `concurrency` clients, or arrivals at `rate` a second, or a `trace` of what happened.

    Lengths are uniform in [(1 - spread) x length, length]. A closed loop sends `requests` prompts, ten a client unless
    told; arrivals at a rate without a number of `requests` never end. A trace lists (arrival in seconds, input tokens,
    output tokens), in order; with `sessions`, whose turn each is: a prompt then begins with what its session said
    before. With `shared_prefix`, prompts of the same agent (of `agents`) begin with the same tokens. With an
    `acceptance`, tokens are guessed ahead, up to `drafts` of them, each of which comes true with that chance.
    """

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 32
    spread: float = 0.0
    requests: int | None = None
    rate: float | None = None
    trace: tuple[tuple[float, int, int], ...] = ()
    shared_prefix: int = 0
    agents: int = 1
    seed: int = 0
    acceptance: float | None = None
    drafts: int = 3
    sessions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "concurrency", "agents"):
            if getattr(self, name) < 1:
                raise WorkloadError("bad_workload", f"{name} is {getattr(self, name)}.", "It must be at least 1.")
        if self.requests is not None and self.requests < 1:
            raise WorkloadError("bad_workload", f"requests is {self.requests}.", "It must be at least 1.")
        if self.rate is not None and self.rate <= 0:
            raise WorkloadError("bad_workload", f"The rate is {self.rate} requests/s.", "It must be above 0.")
        if self.acceptance is not None and not (0 <= self.acceptance <= 1 and self.drafts >= 1):
            raise WorkloadError(
                "bad_workload",
                f"Up to {self.drafts} drafts come true with a chance of {self.acceptance}.",
                "There is at least one draft, and its chance is from 0 to 1, such as 0.8.",
            )
        if self.sessions and len(self.sessions) != len(self.trace):
            raise WorkloadError(
                "bad_workload",
                f"{len(self.trace)} requests are of {len(self.sessions)} sessions.",
                "Name one for each.",
            )
        if not 0 <= self.spread < 1:
            raise WorkloadError("bad_workload", f"spread is {self.spread}.", "It must be in [0, 1).")
        if not 0 <= self.shared_prefix <= self.input_tokens:
            raise WorkloadError(
                "bad_workload",
                f"The shared prefix has {self.shared_prefix} tokens, the prompt {self.input_tokens}.",
                f"Share at most {self.input_tokens}.",
            )

    @property
    def is_closed_loop(self) -> bool:
        return self.rate is None and not self.trace

    @property
    def is_endless(self) -> bool:
        """Arrivals that go on until the engine's answer to them is known."""
        return self.rate is not None and self.requests is None and not self.trace

    @property
    def total_requests(self) -> int:
        if self.trace:
            return len(self.trace)
        return self.requests if self.requests is not None else 10 * self.concurrency

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        if self.trace:
            return max(prompt + output for _, prompt, output in self.trace)
        return self.input_tokens + self.output_tokens

    @property
    def mean_input(self) -> float:
        if self.trace:
            return sum(prompt for _, prompt, _ in self.trace) / len(self.trace)
        return self.input_tokens * (1 - self.spread / 2)

    @property
    def mean_output(self) -> float:
        if self.trace:
            return sum(output for *_, output in self.trace) / len(self.trace)
        return self.output_tokens * (1 - self.spread / 2)

    def lengths(self) -> Iterator[tuple[float, int, int]]:
        """Arrival time (0 in a closed loop), input and output tokens of every request, in order."""
        if self.trace:
            yield from sorted(self.trace)
            return
        chance, clock = random.Random(self.seed), random.Random(TYPICAL_ARRIVALS + self.seed)
        arrival = 0.0
        for _ in count() if self.is_endless else range(self.total_requests):
            if self.rate is not None:
                arrival += clock.expovariate(self.rate)
            yield arrival, self._draw(chance, self.input_tokens), self._draw(chance, self.output_tokens)

    def _draw(self, chance: random.Random, length: int) -> int:
        """As far between the shortest and the longest as it would be for any other length: longer prompts are longer
        each, and change no answer.
        """
        if self.spread == 0:
            return length
        shortest = max(1, round(length * (1 - self.spread)))
        return shortest + int(chance.random() * (length - shortest + 1))
