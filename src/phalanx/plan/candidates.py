"""Ways to deploy a model, what speaks against others, and the plan that ranks them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from phalanx.cost.profiles import profile
from phalanx.plan.engines import EngineTraits
from phalanx.plan.fit import Fit
from phalanx.plan.predict import Prediction
from phalanx.plan.price import HourlyCost, Power, Tariff, power, usd_per_million
from phalanx.plan.scheduled import Room
from phalanx.plan.slo import Slo
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

ANY_SPEED = Slo()
SECONDS_PER_DAY = 86_400

_ROUNDING = 1e-9
"""Of what one machine holds: thirty times it is thirty machines, not one more for the last digit."""


@dataclass(frozen=True)
class Candidate:
    """A way to deploy: `replicas` engines of `tp` GPUs each, times the `stages` of a pipeline. With `attention_ranks`
    each of the `tp` has sequences of its own, and a share of the experts. With `prompt_replicas` so many of the
    replicas compute prompts alone, and the prediction is of all together.

    Fit, prediction and workload are of one replica (of a pipeline or such ranks, of one of the batches in it): on
    unlike GPUs, of the smallest and of the slowest `group`. `paid` are the GPUs it costs, with those that stay idle;
    `copies` how many times the predicted replica's traffic is served: with fewer clients than replicas, some idle. For
    arrivals at a rate, all replicas together hold `capacity` a second; where that is less than was asked for, the
    prediction is for as many as they hold.
    """

    spec: ModelSpec
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
    capacity: float | None = None
    is_held: bool = True
    stages: int = 1
    attention_ranks: int = 1
    prompt_replicas: int = 0

    @property
    def sequences(self) -> int:
        """The most of one replica that run at once: what the plan counted on, and what the engine is started with."""
        room = Room.of(self.workload, profile(self.engine.name).rules, self.fit.kv_tokens // self.stages)
        return room.sequences * self.stages

    @property
    def requests_per_s(self) -> float:
        return self.throughput / self.workload.mean_output

    @property
    def tokens_per_day(self) -> float:
        """Output tokens, at this speed all day."""
        return self.throughput * SECONDS_PER_DAY

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas * self.stages

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
        return f"{self.engine.title} {self.weight_format} TP={self.degrees} x {self.replicas}"

    @property
    def degrees(self) -> str:
        """TP, and how else a replica is split."""
        experts = "+DP" if self.attention_ranks > 1 else "+EP" if self.expert_parallel else ""
        apart = f" {self.prompt_replicas}P+{self.replicas - self.prompt_replicas}D" if self.prompt_replicas else ""
        return f"{self.tp}{experts}{f' PP={self.stages}' if self.stages > 1 else ''}{apart}"


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
        return tuple(candidate for candidate in self.candidates if self.meets(candidate))

    def meets(self, candidate: Candidate) -> bool:
        """It answers requests as fast as they come, and each as fast as was asked for."""
        return candidate.is_held and self.slo.excess(candidate.prediction) <= 1

    @property
    def machines_needed(self) -> int | None:
        """How many such machines hold the rate, each run like the best; None where no rate was asked for."""
        best, rate = self.best, self.workload.rate
        if best is None or best.capacity is None or rate is None:
            return None
        whole = best.capacity / best.replicas * self.machine.most_replicas(best.tp * best.stages)
        return ceil(rate / whole - _ROUNDING)

    @property
    def best(self) -> Candidate | None:
        """The winner; where nothing meets the SLO, the nearest to it."""
        return self.candidates[0] if self.candidates else None

    @cached_property
    def side_by_side(self) -> tuple[Candidate, ...]:
        """The winner's engine and format at every TP degree, smallest first: of each the best number of replicas."""
        by_tp: dict[int, Candidate] = {}
        for each in self.candidates:
            plain = each.stages == each.attention_ranks == 1 and not each.prompt_replicas
            if plain and (each.engine, each.weight_format) == _kind(self.candidates[0]):
                by_tp.setdefault(each.tp, each)
        return tuple(by_tp[tp] for tp in sorted(by_tp))

    def scaling(self, candidate: Candidate) -> float:
        """Tokens a second and GPU against the smallest TP degree that fits."""
        return candidate.per_gpu / self.side_by_side[0].per_gpu

    @property
    def power(self) -> Power | None:
        return power(self.best.paid) if self.best else None


def _kind(candidate: Candidate) -> tuple[EngineTraits, str]:
    return candidate.engine, candidate.weight_format
