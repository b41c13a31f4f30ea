"""Tuning for real: a price of steps as measured here, and engines under load, the few that matter."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import msgspec

from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.ngram import NgramDrafter
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_sums import StepSums
from phalanx.plan.flow import HELD
from phalanx.plan.goodput import SeenRun, Traffic
from phalanx.plan.predict import Interval
from phalanx.plan.simulate import StepPrice
from phalanx.plan.tuning import Rung, Setting, Value
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import cache_layout
from phalanx.runtime.speculate import open_checkpoint
from phalanx.runtime.start import start_engine
from phalanx.spec.workload import Workload
from phalanx.weights.checkpoint import locate

Tell = Callable[[str], None]

_PRICED_STEPS = 6
_PRICED_PROMPT = 256
_FEWEST = 6
_MOST_PROBES = 4
_CHOOSING = 0.4
"""Of the time that there is, for the runs that choose whom to look at closely."""
REAL_WORTH = 1.05
"""Runs of the same differ by this much: a lever that brings less was not seen to bring anything."""


@dataclass(frozen=True)
class LinearPrice:
    """Seconds of a step: something for each, for each row, and for each token of a prompt."""

    step: float
    row: float
    token: float

    def __call__(self, sums: StepSums) -> float:
        return self.step + self.row * sums.decodes + self.token * sums.prompt_tokens


class Bench:
    """An engine of this machine under this traffic: the model is loaded once, with a scheduler for each setting.

    `seconds` is about what one run takes. All of them together end by `deadline`: runs that would not are cut short.
    """

    def __init__(self, config: EngineConfig, traffic: Traffic, seconds: float, deadline: float, tell: Tell) -> None:
        self.traffic = traffic
        self.seconds = seconds
        self.deadline = deadline
        self.tell = tell
        longest = traffic.load.longest + 1
        self._config = msgspec.structs.replace(config, max_model_len=longest, speculate="ngram")
        path = locate(config.model)
        self._spec = open_checkpoint(self._config, path).spec
        tell("Loading")
        self._loaded = start_engine(self._config, path, progress=lambda done, total: None)

    def close(self) -> None:
        self._loaded.close()

    def _until(self, share: float, deadline: float | None = None) -> float:
        """When so much of the time that is left, by default of all, is over."""
        now = time.monotonic()
        return now + share * max(0.0, (self.deadline if deadline is None else deadline) - now)

    def engine(self, setting: Setting) -> Engine:
        """A new scheduler before the same rank, with an empty prefix cache."""
        pool = self._loaded.scheduler.pool
        limits = Limits(
            min(setting.max_num_seqs, self._config.max_num_seqs),
            min(setting.max_num_batched_tokens, self._config.max_num_batched_tokens),
            self._loaded.scheduler.limits.max_model_len,
        )
        speculation = None if setting.speculate == "off" else Speculation(NgramDrafter(), self._config.most_drafts)
        scheduler = Scheduler(
            limits,
            BlockPool(pool.num_blocks, pool.block_size, setting.prefix_caching),
            self._spec.eos_token_ids,
            cache_layout(self._config, self._spec, limits.max_model_len),
            speculation,
        )
        return Engine(scheduler, self._loaded.runner, self._loaded.vocab)

    def price(self, setting: Setting) -> tuple[StepPrice, int]:
        """What steps take here, by decodes of few and of many rows and by prompts; and the tokens of the KV cache."""
        self.tell("Measuring what steps take")
        engine, rows = self.engine(setting), min(setting.max_num_seqs, 16)
        _decode_s(engine, rows)
        one, many, prompt = _decode_s(engine, 1), _decode_s(engine, rows), _prompt_s(engine, _PRICED_PROMPT)
        row = max(0.0, (many - one) / (rows - 1)) if rows > 1 else 0.0
        step = max(one - row, 1e-6)
        pool = engine.scheduler.pool
        return LinearPrice(step, row, max(prompt - step, 0.0) / _PRICED_PROMPT), pool.num_blocks * pool.block_size

    def best_of(self, settings: Sequence[Setting]) -> tuple[Setting, dict[Setting, float]]:
        """By successive halving at saturation: short runs of all, twice as long ones of the better half. With the
        tokens a second that each made there.
        """
        left, requests, end = list(dict.fromkeys(settings)), _FEWEST, self._until(_CHOOSING)
        speeds: dict[Setting, float] = {}
        while len(left) > 1 or not speeds:
            for number, setting in enumerate(left):
                self.tell(f"{requests} requests at once: {_named(setting)}")
                until = self._until(1 / (len(left) - number), end)
                speeds[setting] = self._saturated(self.engine(setting), requests, until)
            keep = 1 if time.monotonic() > end else max(1, len(left) // 2)
            left = sorted(left, key=lambda each: -speeds[each])[:keep]
            requests *= 2
        return left[0], speeds

    def requests_for(self, speed: float) -> int:
        """As many as take about the time of two runs at so many tokens a second."""
        return max(2 * _FEWEST, min(1000, round(2 * self.seconds * speed / self.traffic.load.mean_output)))

    def value(self, setting: Setting, requests: int, share: float) -> Value:
        """The most goodput within the SLO, by bisection on the rate below what it makes of so many requests at once, in
        this share of the time that is left.
        """
        load, slo, end = self.traffic.load, self.traffic.slo, self._until(share)
        self.tell(f"{requests} requests at once: {_named(setting)}")
        saturated = self._saturated(self.engine(setting), requests, self._until(_CHOOSING, end))
        most, engine = saturated / load.mean_output * HELD, self.engine(setting)
        low, high, rate, found = 0.0, most, most, None
        for number in range(_MOST_PROBES):
            self.tell(f"{rate:.2f} requests/s: {_named(setting)}")
            seen = self._at(engine, rate, self._until(1 / (_MOST_PROBES - number), end))
            if slo.excess(seen) <= 1:
                low, found = rate, seen
            else:
                high = rate
            if low == most or time.monotonic() > end:
                break
            rate = (low + high) / 2
        if found is None:
            return Value(0.0, problem="no rate that was tried meets the SLO")
        goodput = low * load.mean_output
        return Value(goodput, low, found.ttft.mid, found.tpot.mid, found.cached_share)

    def _lengths(self, requests: int) -> list[tuple[int, int]]:
        load = self.traffic.load
        if not load.trace:
            load = replace(load, rate=1.0, requests=requests)
        return [(inputs, outputs) for _, inputs, outputs in load.lengths()][:requests]

    def _saturated(self, engine: Engine, requests: int, until: float) -> float:
        lengths, shared = self._lengths(requests), self.traffic.load.shared_prefix
        return drive(engine, lengths, [0.0] * len(lengths), shared, seed=1, until=until).throughput.mid

    def _at(self, engine: Engine, rate: float, until: float) -> SeenRun:
        lengths = self._lengths(max(_FEWEST, min(1000, round(rate * self.seconds))))
        arrivals = [at for at, *_ in Workload(rate=rate, requests=len(lengths)).lengths()]
        return drive(engine, lengths, arrivals, self.traffic.load.shared_prefix, seed=2, until=until)


def _named(setting: Setting) -> str:
    caching = ", prefix caching" if setting.prefix_caching else ""
    guesses = ", speculation" if setting.speculate != "off" else ""
    return f"TP={setting.tp}, {setting.max_num_seqs} x {setting.max_num_batched_tokens}{caching}{guesses}"


@dataclass
class _Timed:
    due: float
    outputs: int
    first: float = 0.0
    last: float = 0.0
    made: int = 0


def drive(
    engine: Engine, lengths: Sequence[tuple[int, int]], arrivals: Sequence[float], shared: int, seed: int, until: float
) -> SeenRun:
    """Requests of these lengths, each handed in when it is due; their prompts begin with the same `shared` tokens.
    What has not come by the moment `until` is left out: who then still waits for a first token has waited so long. The
    first request is always handed in.
    """
    chance, common = random.Random(seed), [5 + place % 89 for place in range(shared)]
    coming = deque(zip(arrivals, lengths, strict=True))
    timed: dict[int, _Timed] = {}
    hits = -engine.scheduler.prefix_hits
    queries = -engine.scheduler.prefix_queries
    began = time.perf_counter()
    while (coming or engine.has_work) and (not timed or time.monotonic() < until):
        now = time.perf_counter() - began
        while coming and coming[0][0] <= now:
            due, (inputs, outputs) = coming.popleft()
            own = [chance.randrange(engine.vocab) for _ in range(max(inputs - shared, 1))]
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs)
            timed[engine.add(common[: inputs - 1] + own, params).id] = _Timed(due, outputs)
        if not engine.has_work:
            time.sleep(coming[0][0] - now)
            continue
        for output in engine.step():
            request, at = timed[output.request_id], time.perf_counter() - began
            request.first, request.last, request.made = request.first or at, at, request.made + 1
    for request_id in timed:
        engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    hits, queries = hits + engine.scheduler.prefix_hits, queries + engine.scheduler.prefix_queries
    return _seen(list(timed.values()), time.perf_counter() - began, hits / queries if queries else 0.0)


def _seen(requests: Sequence[_Timed], ended: float, cached: float) -> SeenRun:
    first = [(request.first or ended) - request.due for request in requests]
    between = [(request.last - request.first) / (request.made - 1) for request in requests if request.made > 1]
    seconds = (max(request.last for request in requests) or ended) - min(request.due for request in requests)
    made = sum(request.made for request in requests) / seconds
    return SeenRun(
        Interval.around(fmean(first), 0.0),
        Interval.around(fmean(between) if between else 0.0, 0.0),
        first,
        between,
        Interval.around(made, 0.0),
        cached,
    )


def _decode_s(engine: Engine, rows: int) -> float:
    """The median of some steps in which so many rows decode."""
    chance = random.Random(rows)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=_PRICED_STEPS + 3)
    for _ in range(rows):
        engine.add([chance.randrange(engine.vocab) for _ in range(8)], params)
    times = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        if len(engine.scheduler.running) == rows:
            times.append(time.perf_counter() - began)
    return median(times[1:] or times)


def _prompt_s(engine: Engine, tokens: int) -> float:
    """The median of some prompts of one chunk."""
    chance, times = random.Random(tokens), []
    tokens = min(tokens, engine.scheduler.limits.max_num_batched_tokens, engine.scheduler.limits.max_model_len - 1)
    for _ in range(3):
        engine.add([chance.randrange(engine.vocab) for _ in range(tokens)], SamplingParams(temperature=0, max_tokens=1))
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        times.append((time.perf_counter() - began) * _PRICED_PROMPT / tokens)
    return median(times)


def tune_for_real(bench: Bench, start: Setting, levers: Sequence[tuple[str, Setting]]) -> list[Rung]:
    """The start and what each lever buys on top of those before it, all measured by the same requests, the start last.
    Levers behind the one that short runs find fastest are not looked at again.
    """
    best, speeds = bench.best_of([start, *(setting for _, setting in levers)])
    tried = [setting for _, setting in levers]
    path = [] if best == start else tried[: tried.index(best) + 1]
    requests = bench.requests_for(max(speeds.values()))
    values: dict[Setting, Value] = {}
    for done, setting in enumerate(order := [*path, start]):
        values[setting] = bench.value(setting, requests, share=1 / (len(order) - done))
    rungs = [Rung("start", start, values[start])]
    for name, setting in levers:
        here, value = rungs[-1], values.get(setting, Value(0.0))
        pays = value.goodput > REAL_WORTH * here.value.goodput
        rungs.append(Rung(name, setting, value) if pays else replace(here, lever=name))
    return rungs
