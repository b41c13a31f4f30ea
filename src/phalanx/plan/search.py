"""What loads and fits of engines, formats, TP degrees and replicas, and how fast each is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.candidates import Candidate, Excluded
from phalanx.plan.engines import GIB, EngineTraits
from phalanx.plan.fit import Fit, fit, stage_of
from phalanx.plan.predict import Prediction, capacity, predict
from phalanx.plan.price import Tariff, cost
from phalanx.plan.shapes import shape
from phalanx.plan.steady import SteadyWatch
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

_FAST_LINKS = ("nvswitch", "mesh")


@dataclass(frozen=True)
class Loaded:
    """`replicas` of an engine that hold the model. The fit is of the smallest `tp` GPUs, `group` are the slowest, and
    `share` is the traffic of one.
    """

    spec: ModelSpec
    engine: EngineTraits
    tp: int
    replicas: int
    expert_parallel: bool
    fit: Fit
    share: Workload
    group: Machine
    stages: int = 1
    attention_ranks: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas * self.stages

    @property
    def capacity(self) -> float:
        """Requests a second that all replicas hold."""
        held, experts = self.fit, self.tp if self.expert_parallel else 1
        formats, split = (held.weight_format, held.kv_format), (self.stages, self.attention_ranks)
        room = held.kv_tokens // self.stages
        one = capacity(self.spec, self.group, self.tp, self.engine.name, self.share, *formats, experts, room, *split)
        return one * self.replicas * self.stages * self.attention_ranks


@dataclass(frozen=True)
class Search:
    """What every candidate has in common."""

    spec: ModelSpec
    machine: Machine
    workload: Workload
    kv_format: str
    tariff: Tariff
    context: int

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
        yield from self._load_apart(engine, weight_format, tp)
        loads = shape(self.spec.in_format(weight_format), tp, engine)
        if not loads.is_legal:
            found = "; ".join(loads.problems) + "."
            yield Excluded(engine.name, tp, weight_format, "illegal_shape", found, loads.fix)
            return
        for stages in self._stages(engine, tp):
            for replicas in _replica_counts(self.machine.most_replicas(tp * stages), self.workload):
                outcome = self.load(engine, weight_format, tp, replicas, loads.expert_parallel, stages)
                yield outcome
                if isinstance(outcome, Excluded):
                    break

    def _load_apart(self, engine: EngineTraits, weight_format: str, ranks: int) -> Iterator[Loaded]:
        """The same GPUs with sequences of their own, each with whole layers but for its share of the experts: for
        models that keep latents, of which tensor-parallel ranks would each hold the same.
        """
        spec, most = self.spec.in_format(weight_format), self.machine.most_replicas(ranks)
        can = engine.has_attention_ranks and spec.latent and spec.moe is not None and spec.moe.experts % ranks == 0
        if (
            not can
            or ranks == 1
            or not most
            or self.machine.smallest.unified_memory
            or not shape(spec, 1, engine).is_legal
        ):
            return
        for replicas in _replica_counts(most, self.workload):
            outcome = self.load(engine, weight_format, ranks, replicas, True, attention_ranks=ranks)
            if isinstance(outcome, Loaded):
                yield outcome

    def _stages(self, engine: EngineTraits, tp: int) -> list[int]:
        """How many stages may share the layers of a model, where the engine can. Between boxes, those that TP fills;
        inside one, where cards are joined by nothing fast: between those with a switch TP is better.
        """
        if not self.machine.most_replicas(tp):
            return []
        if not engine.has_pipelines:
            return [1]
        box = self.machine.per_box or len(self.machine)
        if self.machine.boxes > 1 and tp == box:
            return _divisors(self.machine.boxes)
        if box % tp or self.machine.link(box).kind in _FAST_LINKS:
            return [1]
        return _divisors(box // tp)

    def load(
        self,
        engine: EngineTraits,
        weight_format: str,
        tp: int,
        replicas: int,
        expert_parallel: bool,
        stages: int = 1,
        attention_ranks: int = 1,
    ) -> Loaded | Excluded:
        """The fit of so many replicas, or what it lacks. Of a pipeline, the fit is of its largest stage, and each batch
        runs through it in as many parts as there are stages.
        """
        share = per_replica(self.workload, replicas * stages * attention_ranks)
        groups = self.machine.groups(tp, replicas * stages)
        smallest = min(groups, key=lambda group: group.smallest.memory_bytes)
        slowest = min(groups, key=lambda group: min(gpu.bandwidth for gpu in group.gpus))
        fitted = fit(
            stage_of(self.spec, stages),
            smallest,
            tp,
            engine,
            weight_format=weight_format,
            kv_format=self.kv_format,
            context=self.workload.longest,
            attention_ranks=attention_ranks,
            **({} if self.workload.is_endless else {"sequences": share.concurrency}),
        )
        problem = _no_room(fitted, self.context)
        if problem is not None:
            return problem
        split = stages, attention_ranks
        return Loaded(self.spec, engine, tp, replicas, expert_parallel, fitted, share, slowest, *split)

    def deploy(self, loaded: Loaded, watch: SteadyWatch | None = None) -> Candidate:
        """What it delivers and costs. `watch`: how long to look at arrivals without end."""
        share, replicas = loaded.share, loaded.replicas
        prediction = predict_replica(loaded, share, watch)
        paid = self.machine if self.workload.is_closed_loop else self.machine.take(loaded.gpus)
        return Candidate(
            spec=self.spec,
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
            copies=self.workload.concurrency / share.concurrency
            if self.workload.is_closed_loop
            else replicas * loaded.stages * loaded.attention_ranks,
            stages=loaded.stages,
            attention_ranks=loaded.attention_ranks,
        )


def predict_replica(deployed: Loaded | Candidate, share: Workload, watch: SteadyWatch | None = None) -> Prediction:
    """What one replica does with this traffic; of a pipeline, what it does with one of the parts that are under way in
    it at a time. A part that has passed every stage has passed all layers, as if alone on the GPUs of a stage. Of ranks
    with sequences of their own, what one does.
    """
    fitted = deployed.fit
    return predict(
        deployed.spec,
        deployed.group,
        deployed.tp,
        engine=deployed.engine.name,
        workload=share,
        weights=fitted.weight_format,
        kv=fitted.kv_format,
        ep=deployed.tp if deployed.expert_parallel else 1,
        kv_tokens=fitted.kv_tokens // deployed.stages,
        watch=watch,
        stages=deployed.stages,
        attention_ranks=deployed.attention_ranks,
    )


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _replica_counts(most: int, workload: Workload) -> list[int]:
    """A closed loop fills the machine; so does a rate until it is known what one replica holds; for a trace fewer
    replicas may do.
    """
    if (not workload.trace and workload.requests is None) or workload.is_closed_loop:
        return [most]
    return [count for count in range(1, most + 1) if count == most or count & (count - 1) == 0]


def _turns_of(workload: Workload, replicas: int) -> list[int]:
    """Requests of a trace that one replica has: every so many, or all turns of every so many sessions."""
    if not workload.sessions:
        return list(range(0, len(workload.trace), replicas))
    own = set(list(dict.fromkeys(workload.sessions))[::replicas])
    return [place for place, session in enumerate(workload.sessions) if session in own]


def per_replica(workload: Workload, replicas: int) -> Workload:
    """The traffic of one replica when requests are dealt evenly, and an agent and a session stay with theirs."""
    if replicas == 1:
        return workload
    kept = _turns_of(workload, replicas)
    return dataclasses.replace(
        workload,
        concurrency=-(-workload.concurrency // replicas),
        requests=None if workload.requests is None else -(-workload.requests // replicas),
        rate=None if workload.rate is None else workload.rate / replicas,
        trace=tuple(workload.trace[place] for place in kept),
        sessions=tuple(workload.sessions[place] for place in kept) if workload.sessions else (),
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
