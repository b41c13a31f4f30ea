"""Which TP degree, how many replicas, which format and engine: everything that fits, ranked under the SLO."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import ConfigError
from phalanx.plan.engines import ENGINES, GIB, EngineTraits
from phalanx.plan.fit import Fit, fit
from phalanx.plan.predict import Prediction, predict
from phalanx.plan.price import HourlyCost, Power, Tariff, cost, power, usd_per_million
from phalanx.plan.shapes import MOST_RANKS, shape
from phalanx.plan.slo import Slo
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

ANY_SPEED = Slo()
USUAL_TARIFF = Tariff()


@dataclass(frozen=True)
class Candidate:
    """A way to deploy: `replicas` engines of `tp` GPUs each. Fit, prediction and workload are of one replica: on unlike
    GPUs, of the smallest and of the slowest `group`. `paid` are the GPUs it costs, those that stay idle included;
    `copies` how many times the predicted replica's traffic is served: with fewer clients than replicas, some idle.
    """

    engine: EngineTraits
    tp: int
    replicas: int
    expert_parallel: bool
    fit: Fit
    prediction: Prediction
    workload: Workload
    group: Machine
    paid: Machine
    cost: HourlyCost
    copies: float

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas

    @property
    def weight_format(self) -> str:
        return self.fit.weight_format

    @property
    def throughput(self) -> float:
        """Output tokens a second of all replicas."""
        return self.prediction.throughput.mid * self.copies

    @property
    def per_gpu(self) -> float:
        return self.throughput / len(self.paid)

    @property
    def usd_per_million(self) -> float | None:
        return usd_per_million(self.cost.hourly, self.throughput)

    @property
    def label(self) -> str:
        experts = "+EP" if self.expert_parallel else ""
        return f"{self.engine.title} {self.weight_format} TP={self.tp}{experts} x {self.replicas}"


@dataclass(frozen=True)
class Excluded:
    """A way to deploy that does not work, why, and the bytes a GPU it misses; None: no memory would help."""

    engine: str
    tp: int
    weight_format: str
    code: str
    found: str
    fix: str
    short_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The answer: candidates best first, what was left out, and what the winner needs."""

    spec: ModelSpec
    model: str
    machine: Machine
    workload: Workload
    slo: Slo
    tariff: Tariff
    candidates: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...]
    context: int
    asks_context: bool = False

    @property
    def feasible(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if self.slo.excess(candidate.prediction) <= 1)

    @property
    def best(self) -> Candidate | None:
        """The winner; where nothing meets the SLO, the nearest to it."""
        return self.candidates[0] if self.candidates else None

    @cached_property
    def side_by_side(self) -> tuple[Candidate, ...]:
        """The winner's engine and format at every TP degree, smallest first: of each the best number of replicas."""
        by_tp: dict[int, Candidate] = {}
        for each in self.candidates:
            if each.engine is self.candidates[0].engine and each.weight_format == self.candidates[0].weight_format:
                by_tp.setdefault(each.tp, each)
        return tuple(by_tp[tp] for tp in sorted(by_tp))

    def scaling(self, candidate: Candidate) -> float:
        """Tokens a second and GPU against the smallest TP degree that fits."""
        return candidate.per_gpu / self.side_by_side[0].per_gpu

    @property
    def power(self) -> Power | None:
        return power(self.best.paid) if self.best else None


def choose(
    spec: ModelSpec,
    model: str,
    machine: Machine,
    workload: Workload,
    *,
    slo: Slo = ANY_SPEED,
    engines: Sequence[EngineTraits] = tuple(ENGINES.values()),
    formats: Sequence[str] = (),
    kv_format: str = "bf16",
    tps: Sequence[int] = (),
    tariff: Tariff = USUAL_TARIFF,
    context: int | None = None,
) -> Plan:
    """Everything that loads and fits, ranked: what meets the SLO first, then by tokens a second and GPU.

    `context`: the longest request that must be served, where that is longer than those of the workload.
    """
    longest = max(context or 0, workload.longest)
    if longest > spec.max_positions:
        raise ConfigError(
            "context_too_long",
            f"Requests reach {longest:,} tokens; {model} was made for {spec.max_positions:,}.",
            f"Ask for at most {spec.max_positions:,}, or for a model with a longer context.",
        )
    search = _Search(spec, machine, workload, kv_format, tariff, longest)
    degrees = tps or range(1, min(len(machine), MOST_RANKS) + 1)
    outcomes = search.consider_all(formats or default_formats(spec), engines, degrees)
    if not formats and _small_could_win(spec, machine, outcomes, slo):
        outcomes += search.consider_all(four_bit_formats(machine), engines, degrees)
    candidates = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
    excluded = tuple(outcome for outcome in outcomes if isinstance(outcome, Excluded))
    candidates.sort(key=lambda candidate: _order(candidate, slo))
    return Plan(spec, model, machine, workload, slo, tariff, tuple(candidates), excluded, longest, context is not None)


def default_formats(spec: ModelSpec) -> tuple[str, ...]:
    """The checkpoint's own format, and FP8 where that is still to be had."""
    return (spec.number_format, "fp8") if spec.quantization is None else (spec.number_format,)


def four_bit_formats(machine: Machine) -> tuple[str, ...]:
    """NVFP4 where the cards multiply it, AWQ elsewhere."""
    return ("nvfp4",) if all("fp4" in gpu.peaks for gpu in machine.gpus) else ("awq",)


def _small_could_win(spec: ModelSpec, machine: Machine, outcomes: Sequence[Candidate | Excluded], slo: Slo) -> bool:
    """Four bits are tried where nothing else fits or meets the SLO, where cards have no FP8, or multiply four bits."""
    if spec.quantization is not None:
        return False
    enough = any(isinstance(each, Candidate) and slo.excess(each.prediction) <= 1 for each in outcomes)
    peaks = machine.smallest.peaks
    return not enough or "fp8" not in peaks or "fp4" in peaks


def _order(candidate: Candidate, slo: Slo) -> tuple[bool, float, float]:
    excess = slo.excess(candidate.prediction)
    return (excess > 1, round(max(excess, 1.0), 2), -candidate.per_gpu)


@dataclass(frozen=True)
class _Search:
    """What every candidate has in common."""

    spec: ModelSpec
    machine: Machine
    workload: Workload
    kv_format: str
    tariff: Tariff
    context: int

    def consider_all(
        self, formats: Sequence[str], engines: Sequence[EngineTraits], degrees: Sequence[int]
    ) -> list[Candidate | Excluded]:
        return [
            outcome
            for weight_format in formats
            for engine in engines
            for tp in degrees
            for outcome in self.consider(engine, weight_format, tp)
        ]

    def consider(self, engine: EngineTraits, weight_format: str, tp: int) -> Iterator[Candidate | Excluded]:
        """The candidates of an engine, a format and a TP degree, or why there are none."""
        refused = engine.refusal(self.spec, weight_format, self.kv_format)
        if refused is not None:
            yield Excluded(engine.name, tp, weight_format, "not_loadable", refused, "Use another engine or format.")
            return
        unknown = engine.refuses_card(self.machine, weight_format)
        if unknown is not None:
            yield Excluded(
                engine.name, tp, weight_format, "no_kernels", unknown, "Use another engine or format on this machine."
            )
            return
        loads = shape(self.spec.in_format(weight_format), tp, engine)
        if not loads.is_legal:
            found = "; ".join(loads.problems) + "."
            yield Excluded(engine.name, tp, weight_format, "illegal_shape", found, loads.fix)
            return
        for replicas in _replica_counts(len(self.machine) // tp, self.workload):
            outcome = self._deploy(engine, weight_format, tp, replicas, loads.expert_parallel)
            yield outcome
            if isinstance(outcome, Excluded):
                return

    def _deploy(
        self, engine: EngineTraits, weight_format: str, tp: int, replicas: int, expert_parallel: bool
    ) -> Candidate | Excluded:
        share = per_replica(self.workload, replicas)
        groups = [self.machine.part(rank, tp) for rank in range(0, tp * replicas, tp)]
        smallest = min(groups, key=lambda group: group.smallest.memory_bytes)
        slowest = min(groups, key=lambda group: min(gpu.bandwidth for gpu in group.gpus))
        fitted = fit(
            self.spec,
            smallest,
            tp,
            engine,
            weight_format=weight_format,
            kv_format=self.kv_format,
            context=self.workload.longest,
            sequences=share.concurrency,
        )
        problem = _no_room(fitted, self.context)
        if problem is not None:
            return problem
        prediction = predict_replica(fitted, slowest, share, expert_parallel)
        paid = self.machine if self.workload.is_closed_loop else self.machine.take(tp * replicas)
        price = cost(paid, self.tariff)
        copies = self.workload.concurrency / share.concurrency if self.workload.is_closed_loop else replicas
        return Candidate(engine, tp, replicas, expert_parallel, fitted, prediction, share, slowest, paid, price, copies)


def predict_replica(fitted: Fit, group: Machine, share: Workload, expert_parallel: bool) -> Prediction:
    """What one replica does with its share of the traffic."""
    return predict(
        fitted.spec,
        group,
        fitted.layout.tp,
        engine=fitted.engine.name,
        workload=share,
        weights=fitted.weight_format,
        kv=fitted.kv_format,
        ep=fitted.layout.tp if expert_parallel else 1,
        kv_tokens=fitted.kv_tokens,
    )


def _replica_counts(most: int, workload: Workload) -> list[int]:
    """A closed loop fills the machine; for traffic by the clock fewer replicas may do."""
    if workload.is_closed_loop:
        return [most]
    return [count for count in range(1, most + 1) if count == most or count & (count - 1) == 0]


def per_replica(workload: Workload, replicas: int) -> Workload:
    """The traffic of one replica when requests are dealt evenly and an agent stays with its replica."""
    if replicas == 1:
        return workload
    return dataclasses.replace(
        workload,
        concurrency=-(-workload.concurrency // replicas),
        requests=None if workload.requests is None else -(-workload.requests // replicas),
        rate=None if workload.rate is None else workload.rate / replicas,
        trace=workload.trace[::replicas],
        agents=-(-workload.agents // replicas),
    )


def _no_room(fitted: Fit, longest: int) -> Excluded | None:
    engine, tp, tight = fitted.engine, fitted.layout.tp, fitted.tightest
    if fitted.fits and fitted.longest_context >= longest:
        return None
    weights, memory = tight.weight_bytes / GIB, tight.gpu.memory_bytes / GIB
    if tight.kv_bytes <= 0:
        found = (
            f"Rank {tight.rank} needs {weights:.1f} GiB for weights; with what the engine keeps, {tight.gpu.name} "
            f"({memory:.1f} GiB) is {-tight.kv_bytes / GIB:.1f} GiB short."
        )
        fix = "Use more GPUs, a smaller format or larger cards."
    else:
        found = (
            f"{tight.kv_bytes / GIB:.1f} GiB are left for KV, {fitted.kv_tokens} tokens; one request reaches {longest}."
        )
        fix = f"Shorten requests to {fitted.longest_context} tokens, use more GPUs, FP8 KV or a smaller format."
    short = int(fitted.kv_bytes_per_token * longest - tight.kv_bytes)
    return Excluded(engine.name, tp, fitted.weight_format, "does_not_fit", found, fix, short)
