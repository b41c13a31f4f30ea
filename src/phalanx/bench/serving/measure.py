"""From what the client saw of each request to the figures: plain arithmetic on recorded times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request as the client saw it. All times are seconds of one clock."""

    due: float
    """By the schedule."""
    taken: float = 0.0
    """When the client took it up: later than due only if the client itself is slow."""
    sent: float = 0.0
    """After it got its slot; latencies count from here."""
    text_at: list[float] = field(default_factory=list)
    """When each chunk that carries text was read."""
    ended: float = 0.0
    """When the last chunk of the answer was read: one with text, or the one that says why it ended."""
    prompt_tokens: int = 0
    """As the dataset has it, then as the server counted."""
    output_tokens: int | None = None
    """As the server counted; None if it did not say."""
    cached_tokens: int | None = None
    """Of the prompt, from the server's prefix cache; None if it did not say."""
    drafted: tuple[int, int] = (0, 0)
    """Guesses of tokens that came true and that did not, as far as the server says."""
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, since a chunk may carry several; else the chunks with text."""
        return len(self.text_at) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """An answer without any text (tokens that are none) counts as begun when it ended."""
        return (self.text_at[0] if self.text_at else self.ended) - self.sent

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None without a second token."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    def meets(self, bounds: Mapping[str, float]) -> bool:
        """Whether every bound (ms) holds. A request without a second token meets any bound on TPOT."""
        latencies = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.e2el}
        return all(latencies[name] * 1e3 <= bound for name, bound in bounds.items())


@dataclass(frozen=True)
class Spread:
    """How a latency is distributed, in ms."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray, ranks: Iterable[float]) -> Spread | None:
        """None where there is nothing to describe."""
        if not len(seconds):
            return None
        ms = np.asarray(seconds) * 1e3
        return cls(
            mean=float(ms.mean()),
            median=float(np.median(ms)),
            std=float(ms.std()),
            percentiles={rank: float(np.percentile(ms, rank)) for rank in ranks},
        )


@dataclass(frozen=True)
class LoadSummary:
    """What a run delivered. Only requests answered to the end count, except in `failures`."""

    duration: float
    completed: int
    failures: dict[str, int]
    """How often each message, most frequent first."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None if the server told of no request how much of it was cached."""
    drafted: tuple[int, int]
    """Guesses of tokens that came true and that did not."""
    uncounted: int
    """Requests whose output tokens the server did not count: their chunks with text were counted instead."""
    good: int
    """Requests that meet every bound."""
    max_client_delay: float
    """Seconds; the longest from when a request was due until the client took it up."""
    latencies: dict[str, Spread | None]
    """ttft, tpot, itl, e2el, and client_queue_time: from being taken up until a slot was free."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def per_second(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def gaps(traces: Iterable[RequestTrace]) -> np.ndarray:
    """Seconds between one chunk with text and the next of the same answer, of all answers together."""
    return np.concatenate([np.empty(0), *(np.diff(trace.text_at) for trace in traces)])


def summarise(
    traces: Sequence[RequestTrace], duration: float, bounds: Mapping[str, float], ranks: Sequence[float]
) -> LoadSummary:
    done = [trace for trace in traces if trace.error is None]
    told = [trace.cached_tokens for trace in done if trace.cached_tokens is not None]
    seconds: dict[str, Sequence[float] | np.ndarray] = {
        "ttft": [trace.ttft for trace in done],
        "tpot": [trace.tpot for trace in done if trace.tpot is not None],
        "itl": gaps(done),
        "e2el": [trace.e2el for trace in done],
        "client_queue_time": [trace.sent - trace.taken for trace in done],
    }
    return LoadSummary(
        duration=duration,
        completed=len(done),
        failures=dict(Counter(trace.error for trace in traces if trace.error is not None).most_common()),
        input_tokens=sum(trace.prompt_tokens for trace in done),
        output_tokens=sum(trace.tokens for trace in done),
        cached_tokens=sum(told) if told else None,
        drafted=(sum(trace.drafted[0] for trace in done), sum(trace.drafted[1] for trace in done)),
        uncounted=sum(trace.output_tokens is None for trace in done),
        good=sum(trace.meets(bounds) for trace in done),
        max_client_delay=max((trace.taken - trace.due for trace in traces), default=0.0),
        latencies={name: Spread.of(values, ranks) for name, values in seconds.items()},
    )
