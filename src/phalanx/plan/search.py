"""What loads and fits of engines, formats, TP degrees and replicas, and how fast each is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.candidates import Candidate, Excluded
from phalanx.plan.engines import GIB, EngineTraits
from phalanx.plan.fit import Fit, fit
from phalanx.plan.predict import Prediction, capacity, predict
from phalanx.plan.price import Tariff, cost
from phalanx.plan.shapes import shape
from phalanx.plan.steady import Watch
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload


@dataclass(frozen=True)
class Loaded:
    """`replicas` of an engine that hold the model. The fit is of the smallest `tp` GPUs, `group` are the slowest, and
    `share` is the traffic of one.
    """

    engine: EngineTraits
    tp: int
    replicas: int
    expert_parallel: bool
    fit: Fit
    share: Workload
    group: Machine

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas

    @property
    def capacity(self) -> float:
        """Requests a second that all replicas hold."""
        held = self.fit
        experts = self.tp if self.expert_parallel else 1
        formats = held.weight_format, held.kv_format
        one = capacity(held.spec, self.group, self.tp, self.engine.name, self.share, *formats, experts, held.kv_tokens)
        return one * self.replicas


@dataclass(frozen=True)
class Search:
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
            self.deploy(outcome) if isinstance(outcome, Loaded) else outcome
            for outcome in self.load_all(formats, engines, degrees)
        ]

    def load_all(
        self, formats: Sequence[str], engines: Sequence[EngineTraits], degrees: Sequence[int]
    ) -> Iterator[Loaded | Excluded]:
        for weight_format in formats:
            for engine in engines:
                for tp in degrees:
                    yield from self._load(engine, weight_format, tp)

    def _load(self, engine: EngineTraits, weight_format: str, tp: int) -> Iterator[Loaded | Excluded]:
        """An engine, a format and a TP degree with every number of replicas, or why there are none."""
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
            outcome = self.load(engine, weight_format, tp, replicas, loads.expert_parallel)
            yield outcome
            if isinstance(outcome, Excluded):
                return

    def load(
        self, engine: EngineTraits, weight_format: str, tp: int, replicas: int, expert_parallel: bool
    ) -> Loaded | Excluded:
        """The fit of so many replicas, or what it lacks."""
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
            **({} if self.workload.is_endless else {"sequences": share.concurrency}),
        )
        problem = _no_room(fitted, self.context)
        if problem is not None:
            return problem
        return Loaded(engine, tp, replicas, expert_parallel, fitted, share, slowest)

    def deploy(self, loaded: Loaded, watch: Watch | None = None) -> Candidate:
        """What it delivers and costs. `watch`: how long to look at arrivals without end."""
        share, replicas = loaded.share, loaded.replicas
        prediction = predict_replica(loaded.fit, loaded.group, share, loaded.expert_parallel, watch)
        paid = self.machine if self.workload.is_closed_loop else self.machine.take(loaded.gpus)
        return Candidate(
            engine=loaded.engine,
            tp=loaded.tp,
            replicas=replicas,
            expert_parallel=loaded.expert_parallel,
            fit=loaded.fit,
            prediction=prediction,
            workload=share,
            group=loaded.group,
            paid=paid,
            cost=cost(paid, self.tariff),
            copies=self.workload.concurrency / share.concurrency if self.workload.is_closed_loop else replicas,
        )


def predict_replica(
    fitted: Fit, group: Machine, share: Workload, expert_parallel: bool, watch: Watch | None = None
) -> Prediction:
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
        watch=watch,
    )


def _replica_counts(most: int, workload: Workload) -> list[int]:
    """A closed loop fills the machine; so does a rate until it is known what one replica holds; for a trace fewer
    replicas may do.
    """
    if (not workload.trace and workload.requests is None) or workload.is_closed_loop:
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
