"""Sampler: one sample a second of what the engine does; an hour of them is kept, whether or not someone looks."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from phalanx.engine.step_plan import Totals
from phalanx.server.engine_client import EngineClient
from phalanx.server.gpu_watch import GpuReading
from phalanx.server.messages import Books
from phalanx.server.recent import Heard, Recent
from phalanx.server.supervisor import Supervisor
from phalanx.web.expect import Expectation, Expected, Load

EVERY_S = 1.0
KEPT = 3600
WINDOW = 10
"""Samples that percentiles and the share of hits look back on."""
LONG_WINDOW = 600
"""Samples that the usual lengths of requests look back on."""

PARTS = ("schedule", "launch", "device", "all_reduce", "sample")
_NOTHING = Books(0, 0, 0, 0, 0, 0, Totals())


class RankSample(msgspec.Struct, array_like=True, frozen=True):
    """Milliseconds a step by part, in the order of PARTS, and the share of the time that the rank was busy."""

    parts_ms: list[float]
    busy: float


class GpuSample(msgspec.Struct, array_like=True, frozen=True):
    """GiB in use, watts, degrees Celsius."""

    memory: float | None
    watts: float | None
    celsius: int | None


class Sample(msgspec.Struct, frozen=True, kw_only=True, rename={"inputs": "in", "outputs": "out", "time": "t"}):
    """A second of the engine's life. Rates are a second, shares 0 to 1; None where nothing happened to measure.

    `ttft` and `itl` are milliseconds: the 50th, 90th and 99th percentile of the last ten seconds. `expected_itl` has
    its bounds beside it. Of the prompts' tokens, `cached` were found in the prefix cache; `hits` is their share over
    the last ten seconds, `accepted` that of drafts that came true. `held` and `kept` are shares of the KV blocks: held
    by requests, and kept for their prefix. Requests ran in a share of the time, `working`.
    """

    time: float
    up: bool
    inputs: float
    cached: float
    outputs: float
    expected_out: float | None
    ttft: list[float] | None
    itl: list[float] | None
    itl_mean: float | None
    expected_itl: list[float] | None
    running: float
    waiting: float
    held: float
    kept: float
    hits: float | None
    accepted: float | None
    preemptions: int
    steps: float
    ranks: list[RankSample | None]
    gpus: list[GpuSample] = []
    working: float = 1.0


class LoadSampler:
    """Makes a sample of what `recent` heard and the ranks told since the last one. A new engine counts from zero."""

    def __init__(self, supervisor: Supervisor, recent: Recent, gpus: Callable[[], list[GpuReading]] = list) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.taken = 0
        self.expectation: Expectation | None = None
        self._supervisor = supervisor
        self._recent = recent
        self._gpus = gpus
        self._client: EngineClient | None = None
        self._books = _NOTHING
        self._ranks: dict[int, tuple[Totals, float]] = {}
        self._first: deque[array[float]] = deque(maxlen=WINDOW)
        self._gaps: deque[array[float]] = deque(maxlen=WINDOW)
        self._prefixes: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._drafts: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._requests: deque[tuple[int, int, int]] = deque(maxlen=LONG_WINDOW)

    def sample(self) -> Sample:
        """Take one now; it joins those kept."""
        client = self._supervisor.client
        if client is not self._client:
            self._client, self._books, self._ranks = client, _NOTHING, {}
        if self._supervisor.death is not None:
            self._recent.engine_lost()
        heard, books = self._recent.take(), self._recent.books or self._books
        made = self._made(client, heard, self._books, books)
        self._books = books
        self.samples.append(made)
        self.taken += 1
        return made

    def _made(self, client: EngineClient, heard: Heard, before: Books, after: Books) -> Sample:
        inputs, hits = after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits
        self._first.append(heard.first_token)
        self._gaps.append(heard.token_gap)
        self._prefixes.append((inputs, hits))
        old, new = before.speculation, after.speculation
        self._drafts.append((new.draft_tokens - old.draft_tokens, new.accepted_tokens - old.accepted_tokens))
        self._requests.append((len(heard.first_token), inputs, heard.output_tokens))
        gap_s = sum(heard.token_gap) / len(heard.token_gap) if heard.token_gap else None
        steps = after.totals.steps - before.totals.steps
        expected = self._expected(before.totals, after.totals, gap_s)
        busy = heard.working_s / heard.seconds
        blocks = client.started.num_blocks if client.started is not None else 1
        up = self._supervisor.state in ("ready", "draining")
        return Sample(
            time=round(time.time(), 2),
            up=up,
            inputs=_short(inputs / heard.seconds),
            cached=_short(hits / heard.seconds),
            outputs=_short(heard.output_tokens / heard.seconds),
            expected_out=_short(heard.output_tokens / steps / expected.step_s * busy) if expected else None,
            ttft=percentiles_ms(self._first),
            itl=percentiles_ms(self._gaps),
            itl_mean=_short(gap_s * 1e3) if gap_s is not None else None,
            expected_itl=[_short(value * 1e3) for value in (expected.gap.mid, expected.gap.low, expected.gap.high)]
            if expected
            else None,
            running=_short(heard.running_s / heard.seconds),
            waiting=_short(heard.waiting_s / heard.seconds),
            held=_short(heard.held_block_s / heard.seconds / blocks),
            kept=_short(after.idle_blocks / blocks) if up else 0.0,
            hits=_share(self._prefixes),
            accepted=_share(self._drafts),
            preemptions=after.preemptions - before.preemptions,
            steps=_short(steps / heard.seconds),
            ranks=self._rank_samples(client) if up else [],
            gpus=[_gpu_sample(reading) for reading in self._gpus()],
            working=_short(busy),
        )

    def _expected(self, before: Totals, after: Totals, gap_s: float | None) -> Expected | None:
        """What to expect of the steps since the last sample, and what was measured, to learn from."""
        if self.expectation is None:
            return None
        requests, inputs, outputs = (max(sum(column), 1) for column in zip(*self._requests, strict=True))
        load = Load.between(before, after, inputs / requests, outputs / requests)
        if load is None or gap_s is None:
            return None
        self.expectation.learn(load, gap_s)
        return self.expectation.of(load)

    def _rank_samples(self, client: EngineClient) -> list[RankSample | None]:
        told = client.totals()
        samples = [_rank_sample(self._ranks.get(rank), now) for rank, now in told.items()]
        self._ranks = told
        return samples


def percentiles_ms(window: Iterable[array[float]]) -> list[float] | None:
    """The 50th, 90th and 99th percentile of all values, in milliseconds: the value that so many do not exceed."""
    values = np.concatenate([np.frombuffer(part) for part in window])
    if not len(values):
        return None
    return [_short(value * 1e3) for value in np.percentile(values, [50, 90, 99], method="inverted_cdf").tolist()]


def _share(window: Iterable[tuple[int, int]]) -> float | None:
    of, hits = (sum(column) for column in zip(*window, strict=True))
    return _short(hits / of) if of else None


def _rank_sample(before: tuple[Totals, float] | None, now: tuple[Totals, float]) -> RankSample | None:
    """None where a rank has finished no step, or has told nothing, since the last sample."""
    totals, heard = now
    earlier, heard_before = before or (Totals(), heard - EVERY_S)
    finished, seconds = totals.finished - earlier.finished, heard - heard_before
    if finished < 1 or seconds <= 0:
        return None
    spent = [getattr(totals, f"{part}_s") - getattr(earlier, f"{part}_s") for part in PARTS]
    return RankSample([_short(part / finished * 1e3) for part in spent], _short(min(sum(spent) / seconds, 1.0)))


def _gpu_sample(reading: GpuReading) -> GpuSample:
    memory, watts = reading.memory_used, reading.watts
    return GpuSample(
        None if memory is None else _short(memory), None if watts is None else _short(watts), reading.celsius
    )


def _short(value: float) -> float:
    """Four digits are enough to draw."""
    return float(f"{value:.4g}")
