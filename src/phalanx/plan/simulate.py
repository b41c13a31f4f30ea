"""The engine's own scheduler in virtual time: a workload in, the steps it takes and when each request moves out.

In a closed loop the order of steps does not depend on how long they take, so one simulation serves every GPU, TP degree
and number format: `Trace.times` prices its steps afterwards. With arrivals by the clock the price is needed at once.
Where nothing is shared between prompts, the scheduler's steps are counted, which takes a tenth of the time or less.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, islice

from phalanx.cost.rules import Rules
from phalanx.engine.step_sums import StepSums
from phalanx.plan.counted import CountedBatch
from phalanx.plan.scheduled import ScheduledBatch
from phalanx.plan.steady import SteadyWatch
from phalanx.spec.workload import Workload

_FOREVER = 2**31
_FEWEST_WAVES = 3
_FEWEST_REQUESTS = 64
StepPrice = Callable[[StepSums], float]


@dataclass(frozen=True)
class WaitingPrice:
    """Of a batch that moves together with others: steps without prompts wait for theirs, on average."""

    price: StepPrice
    wait: float

    def __call__(self, step: StepSums) -> float:
        return self.price(step) + (0.0 if step.prompt_tokens else self.wait)


@dataclass
class Passage:
    """How one request passed, by step boundaries: boundary i is the start of step i. Sent `early` seconds before one.

    `weight`: how many requests of the workload it stands for.
    """

    input_tokens: int
    output_tokens: int
    sent: int
    early: float = 0.0
    weight: float = 1.0
    first: int = -1
    last: int = -1


@dataclass
class Trace:
    """Every step of a run in order, and the passage of every request. Steps alike stand once, with their number. Of
    arrivals without end, the passages from when the run was steady on; none where it never was. `seconds` are those of
    the steps as `price` had them, where the run went by the clock.
    """

    steps: list[StepSums] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    idle_seconds: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_steady: bool = True
    seconds: list[float] = field(default_factory=list)
    price: StepPrice | None = None

    def step_weights(self) -> tuple[list[float], list[float]]:
        """How much every step counts in the mean TTFT and in the mean TPOT of all requests."""
        ttft, tpot = [0.0] * (len(self.steps) + 1), [0.0] * (len(self.steps) + 1)
        requests = sum(passage.weight for passage in self.passages)
        answers = sum(passage.weight for passage in self.passages if passage.output_tokens > 1)
        for passage in self.passages:
            ttft[passage.sent] += passage.weight / requests
            ttft[passage.first] -= passage.weight / requests
            if passage.output_tokens > 1:
                share = passage.weight / answers / (passage.output_tokens - 1)
                tpot[passage.first] += share
                tpot[passage.last] -= share
        return tuple(  # type: ignore[return-value]
            [max(0.0, running) * count for running, count in zip(accumulate(changes), self.repeats, strict=False)]
            for changes in (ttft, tpot)
        )

    def clock(self, price: StepPrice) -> list[float]:
        """Seconds at every boundary when steps cost this much."""
        seconds = self.seconds if price is self.price else map(price, self.steps)
        return list(accumulate(map(operator.mul, seconds, self.repeats), initial=0.0))

    @property
    def together(self) -> tuple[int, int]:
        """The boundaries between which all requests decode: the last first token and the first end. Where some end
        before others begin, the one step behind the last first token stands for them.
        """
        opens = max(passage.first for passage in self.passages)
        return opens, max(opens + 1, min(passage.last for passage in self.passages))

    def times(self, price: StepPrice) -> Times:
        """What requests see when steps cost this much."""
        clock = self.clock(price)
        longer = [passage for passage in self.passages if passage.output_tokens > 1]
        ttft = [clock[passage.first] - clock[passage.sent] + passage.early for passage in self.passages]
        tpot = [(clock[passage.last] - clock[passage.first]) / (passage.output_tokens - 1) for passage in longer]
        return Times(
            ttft=ttft,
            tpot=tpot,
            mean_ttft=_mean(ttft, [passage.weight for passage in self.passages]),
            mean_tpot=_mean(tpot, [passage.weight for passage in longer]),
            seconds=clock[-1] + self.idle_seconds,
            output_tokens=sum(passage.output_tokens for passage in self.passages),
        )


@dataclass(frozen=True)
class Times:
    """Seconds to the first token and between tokens, one of each a request; and how long the whole run took."""

    ttft: list[float]
    tpot: list[float]
    mean_ttft: float
    mean_tpot: float
    seconds: float
    output_tokens: int


def _mean(values: list[float], weights: list[float]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0


def simulate(
    workload: Workload,
    rules: Rules,
    kv_tokens: int | None = None,
    price: StepPrice | None = None,
    watch: SteadyWatch | None = None,
) -> Trace:
    """Run the workload through the scheduler. `kv_tokens`: room of the KV cache; None means it never runs out. `watch`:
    who says when arrivals without end have been seen for long enough.
    """
    return _Simulation(workload, rules, kv_tokens, price, watch).run()


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        rules: Rules,
        kv_tokens: int | None,
        price: StepPrice | None,
        watch: SteadyWatch | None = None,
    ) -> None:
        assert workload.is_closed_loop or price is not None, "arrivals by the clock need a price"
        self._watch = watch or SteadyWatch() if workload.is_endless else None
        self.workload = workload
        self.trace = Trace(price=price)
        counted = CountedBatch.covers(workload, rules, kv_tokens)
        self.batch = (CountedBatch if counted else ScheduledBatch)(workload, rules, kv_tokens)
        self.clock = 0.0
        self._price: StepPrice = price if price is not None else lambda step: 0.0
        self._coming = iter(enumerate(islice(workload.lengths(), None if self._watch else _simulated(workload))))
        self._next = next(self._coming, None)
        self._passages: dict[int, Passage] = {}
        self._poll_steps, self._since_poll = rules.poll_steps, 0
        self._unseen: list[int] = []
        """Prompts that were sent since the engine looked, by the boundaries at which that was."""

    def run(self) -> Trace:
        if self.workload.is_closed_loop:
            self._run_closed_loop()
        else:
            self._run_by_the_clock()
        self.trace.passages = list(self._passages.values())
        self.trace.preemptions = self.batch.preemptions
        self.trace.prompt_tokens = sum(passage.input_tokens for passage in self.trace.passages)
        self.trace.cached_tokens = self.batch.cached_tokens
        if self._watch is not None:
            self.trace.is_steady = not self._watch.grows
            self.trace.passages = self._watch.steady_part(self.trace.passages)
        return self.trace

    def _run_closed_loop(self) -> None:
        """A client sends its next prompt when its last answer ends; it misses the step that starts just then."""
        at_once = self.workload.total_requests <= self.workload.concurrency
        self._send(self.workload.concurrency if at_once else 1)
        on_the_way = 0 if at_once else self.workload.concurrency - 1
        while self.batch.is_busy or on_the_way or self._unseen:
            if not self.batch.is_busy:
                self._look()
                on_the_way = self._send(on_the_way)
                continue
            arriving, on_the_way = on_the_way, self._step()
            self._unseen += [len(self.trace.steps) - 1] * arriving
            found = self._look() if self._since_poll >= self._poll_steps else len(self._unseen)
            if not found and not on_the_way:
                self._leap()

    def _look(self) -> int:
        """The engine takes in what was sent since it looked last. Returns how many that were."""
        self._since_poll, found = 0, len(self._unseen)
        for sent in self._unseen:
            self._send(1, sent)
        self._unseen.clear()
        return found

    def _run_by_the_clock(self) -> None:
        while (self._next is not None or self.batch.is_busy) and not (self._watch and self._watch.has_seen_enough):
            if not self.batch.is_busy:
                self._wait_for_next()
            while self._next is not None and self._next[1][0] <= self.clock:
                self._send(1)
            self._step()
            self._leap()

    def _wait_for_next(self) -> None:
        assert self._next is not None
        arrival = max(self.clock, self._next[1][0])
        self.trace.idle_seconds += arrival - self.clock
        self.clock = arrival

    def _send(self, count: int, sent: int | None = None) -> int:
        """Hand the next `count` prompts to the batch; they were sent at boundary `sent`."""
        boundary = len(self.trace.steps) if sent is None else sent
        for _ in range(count):
            if self._next is None:
                return 0
            index, (arrival, input_tokens, output_tokens) = self._next
            early = 0.0 if self.workload.is_closed_loop else self.clock - arrival
            self.batch.add(index, input_tokens, output_tokens)
            if self._watch is not None:
                self._watch.sent(arrival)
            self._passages[index] = Passage(input_tokens, output_tokens, boundary, early, self._weight(index))
            self._next = next(self._coming, None)
        return 0

    def _weight(self, index: int) -> float:
        """Requests of a closed loop after its first wave stand for those that were left out."""
        if not self.workload.is_closed_loop:
            return 1.0
        total, simulated, wave = self.workload.total_requests, _simulated(self.workload), self.workload.concurrency
        return 1.0 if index < wave or simulated == total else (total - wave) / (simulated - wave)

    def _step(self) -> int:
        """One step of the engine. Returns how many requests it finished."""
        moves = self.batch.step()
        self._take(moves.step)
        boundary = len(self.trace.steps)
        self._since_poll += self._poll_steps if moves.step.prompt_tokens else 1
        for index in moves.first:
            self._passages[index].first = boundary
            if self._watch is not None:
                self._watch.began(index, self.clock)
        for index in moves.last:
            self._passages[index].last = boundary
            if self._watch is not None:
                self._watch.ended(index, self.clock, self._passages[index].output_tokens)
        return len(moves.last)

    def _take(self, step: StepSums, repeats: int = 1) -> None:
        self.trace.steps.append(step)
        self.trace.repeats.append(repeats)
        seconds = self._price(step)
        self.trace.seconds.append(seconds)
        self.clock += repeats * seconds

    def _leap(self) -> None:
        leap = self.batch.leap(self._steps_before_next)
        if leap is not None:
            self._take(*leap)
            self._since_poll = (self._since_poll + leap[1]) % self._poll_steps

    def _steps_before_next(self, step: StepSums) -> int:
        """Steps like this one that end before the next request arrives by the clock."""
        if self.workload.is_closed_loop or self._next is None:
            return _FOREVER
        return int((self._next[1][0] - self.clock) / self._price(step))


def _simulated(workload: Workload) -> int:
    """Requests that are simulated: of a closed loop the first waves, the later of which stand for those left out.

    Where lengths vary little, waves lose step with each other slowly, so this keeps TTFT up to a fifth too long; the
    fitted numbers were found with the same simulation and make up for it.
    """
    if not workload.is_closed_loop:
        return workload.total_requests
    return min(workload.total_requests, max(_FEWEST_WAVES * workload.concurrency, _FEWEST_REQUESTS))
