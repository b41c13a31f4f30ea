"""The most goodput that an SLO allows, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phalanx.cost.profiles import profile
from phalanx.cost.rules import Rules
from phalanx.errors import PhalanxError
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.plan.flow import HELD
from phalanx.plan.predict import Interval, Prediction, predictor
from phalanx.plan.search import per_replica
from phalanx.plan.simulate import StepPrice, simulate
from phalanx.plan.slo import Slo
from phalanx.plan.steady import SteadyWatch
from phalanx.plan.tuning import Setting, Value
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

_CLOSE = 1.04
"""Rates nearer than this are not told apart."""
_GLANCE = 2
_SATURATED = 4
"""Requests a place of the batch that say what an engine does at most."""
_KEEPS_UP = 0.9


@dataclass(frozen=True)
class SeenRun:
    """What requests saw, as far as an SLO asks: mean seconds and those of each; tokens a second; share cached."""

    ttft: Interval
    tpot: Interval
    requests_ttft: Sequence[float]
    requests_tpot: Sequence[float]
    throughput: Interval
    cached_share: float


Try = Callable[[Workload], SeenRun | Prediction]
"""One replica under some traffic."""


@dataclass(frozen=True)
class Traffic:
    """Lengths and what is shared of them, and what users bear. Rate and concurrency of the load do not matter."""

    load: Workload
    slo: Slo

    def best(self, run: Try, replicas: int, sequences: int) -> Value:
        """The highest rate at which the SLO is met, by bisection below what a full batch does."""
        load = per_replica(self._lengths, replicas)
        seats = replace(load, trace=(), rate=None, concurrency=sequences, requests=_SATURATED * sequences)
        seats = seats if not load.trace else replace(load, trace=tuple((0.0, *each[1:]) for each in load.trace))
        most = run(seats).throughput.mid / load.mean_output * HELD
        low, high, found = 0.0, most, None
        rate = most
        while high / max(low, most / 100) > _CLOSE:
            seen = run(self._at(load, rate))
            if self._holds(seen, rate * load.mean_output):
                low, found = rate, seen
            else:
                high = rate
            if low == most:
                break
            rate = (low + high) / 2
        if found is None:
            return Value(0.0, problem="no rate meets the SLO")
        goodput = low * load.mean_output * replicas
        return Value(goodput, low * replicas, found.ttft.mid, found.tpot.mid, found.cached_share)

    @property
    def _lengths(self) -> Workload:
        return self.load if self.load.trace else replace(self.load, rate=1.0, requests=None)

    def _at(self, load: Workload, rate: float) -> Workload:
        """A trace is played faster or slower."""
        if not load.trace:
            return replace(load, rate=rate)
        span = load.trace[-1][0] or 1.0
        factor = len(load.trace) / rate / span
        return replace(load, trace=tuple((arrival * factor, *lengths) for arrival, *lengths in load.trace))  # type: ignore[misc]

    def _holds(self, seen: SeenRun | Prediction, offered: float) -> bool:
        return self.slo.excess(seen) <= 1 and seen.throughput.mid >= _KEEPS_UP * offered


@dataclass
class PlannedRun:
    """Judges settings by data sheets and fitted numbers of an engine."""

    spec: ModelSpec
    machine: Machine
    traffic: Traffic
    engine: str = "phalanx"
    _known: dict[Setting, Value] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Value:
        if setting not in self._known:
            self._known[setting] = self._judge(setting)
        return self._known[setting]

    def _judge(self, setting: Setting) -> Value:
        try:
            return self.traffic.best(lambda load: self.run(setting, load), setting.replicas, setting.max_num_seqs)
        except PhalanxError as error:
            return Value(0.0, problem=error.found)

    def run(self, setting: Setting, load: Workload) -> Prediction:
        """One replica. Without caching, nothing that prompts share helps."""
        traits = ENGINES[self.engine]
        load = load if setting.prefix_caching else replace(load, shared_prefix=0)
        fitted = fit(
            self.spec,
            self.machine,
            setting.tp,
            traits,
            weight_format=setting.weights,
            kv_format=setting.kv,
            context=load.longest,
            batched_tokens=setting.max_num_batched_tokens,
            sequences=setting.max_num_seqs,
        )
        if not fitted.fits:
            raise PhalanxError("does_not_fit", f"{setting.weights} at TP={setting.tp} does not fit.", "Use more GPUs.")
        rules = rules_of(setting, profile(self.engine).rules)
        made = predictor(self.spec, self.machine, setting.tp, self.engine, load, setting.weights, setting.kv)
        if load.is_endless:
            made = made.under(made.in_flight(load, rules, fitted.kv_tokens))
        return made.predict(load, rules, fitted.kv_tokens, SteadyWatch(_GLANCE) if load.is_endless else None)


def rules_of(setting: Setting, rules: Rules) -> Rules:
    admission = rules.admission if setting.admission == "fair" else setting.admission
    return replace(
        rules,
        admission=admission,
        max_batched_tokens=setting.max_num_batched_tokens,
        max_sequences=setting.max_num_seqs,
    )


@dataclass(frozen=True)
class Priced:
    """Judges settings by a price of steps that was measured. Ranks and precision are as they were then."""

    price: StepPrice
    kv_tokens: int
    traffic: Traffic

    def __call__(self, setting: Setting) -> Value:
        return self.traffic.best(lambda load: self.run(setting, load), 1, setting.max_num_seqs)

    def run(self, setting: Setting, load: Workload) -> SeenRun:
        load = load if setting.prefix_caching else replace(load, shared_prefix=0)
        watch = SteadyWatch(_GLANCE) if load.is_endless else None
        trace = simulate(load, rules_of(setting, Rules("fair")), self.kv_tokens, self.price, watch)
        times = trace.times(self.price)
        made = times.output_tokens / times.seconds if times.seconds else 0.0
        throughput = load.rate * load.mean_output if load.is_endless and load.rate else made
        return SeenRun(
            Interval.around(times.mean_ttft, 0.0),
            Interval.around(times.mean_tpot, 0.0),
            times.ttft,
            times.tpot,
            Interval.around(throughput, 0.0),
            trace.cached_tokens / trace.prompt_tokens if trace.prompt_tokens else 0.0,
        )
