"""Prompts on some replicas, answers on others: what each of them does, and what goes over the link between.

A closed loop of clients goes round: a prompt waits for its turn, is computed, its keys and values are sent, and the
answer is decoded beside as many others as there are then. Where all of these add up to the clients there are, that is
how fast it turns. Decodes are undisturbed; replicas that only take prompts in do so one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log

from phalanx.cost.allreduce import hand_over_seconds
from phalanx.cost.profiles import profile
from phalanx.engine.step_sums import StepSums
from phalanx.plan.candidates import Candidate
from phalanx.plan.predict import Prediction, Predictor, predictor
from phalanx.plan.price import cost
from phalanx.plan.rates import order
from phalanx.plan.search import Loaded, Search
from phalanx.plan.simulate import StepPrice
from phalanx.plan.slo import Slo
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

FEWEST_GPUS = 16
"""In one box a chunk of the right size does as much."""
_MOST_WAYS = 16
_FULL = 0.999
_UNSEEN = 1.5
"""How much wider intervals are: no run of this kind was fitted. A rule of thumb."""
_QUANTILES = 64


@dataclass(frozen=True)
class Lap:
    """Of a closed loop: requests a second, those that one replica decodes at once, and seconds before the first token
    and between tokens.
    """

    rate: float
    batch: float
    waited: float
    prompt: float
    sent: float
    between: float


@dataclass(frozen=True)
class Apart:
    """So many replicas for `prompts`, and so many for `answers`, each of whom has room for `most_sequences`; keys and
    values of a prompt take `transfer` seconds from one to another. `step_tokens`: of prompts in one step.
    """

    load: Workload
    price: StepPrice
    prompts: int
    answers: int
    transfer: float
    most_sequences: float
    step_tokens: int

    def lap(self) -> Lap:
        """By halving: the batch at which all clients are somewhere."""
        clients = self.load.concurrency
        low, high = 0.0, min(self.most_sequences, clients / self.answers)
        if self.present(high) < clients:
            return self._at(high)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.present(middle) < clients else (low, middle)
        return self._at(low)

    def present(self, batch: float) -> float:
        """Clients that are somewhere when so many are decoded at once."""
        lap = self._at(batch)
        if lap.rate * self._prompt_seconds[1] / self.prompts >= 1:
            return float("inf")
        return self.answers * batch + lap.rate * (lap.waited + lap.prompt + lap.sent)

    def _at(self, batch: float) -> Lap:
        between = self.price(self.decodes(batch))
        rate = self.answers * batch / (max(1.0, self.load.mean_output - 1) * between)
        alone, each = self._prompt_seconds
        busy = min(_FULL, rate * each / self.prompts)
        others = 1 - 1 / self.load.concurrency  # nobody waits for a prompt of their own
        return Lap(rate, batch, others * each * busy / (2 * (1 - busy)), alone, self.transfer, between)

    def decodes(self, batch: float) -> StepSums:
        rows = max(1, round(batch))
        return StepSums(rows, rows * (self.load.mean_input + self.load.mean_output / 2))

    @cached_property
    def _prompt_seconds(self) -> tuple[float, float]:
        """Of a prompt by itself, and of one among as many as a step takes; neither sooner than it can be sent."""
        tokens = max(1, round(self.load.mean_input))
        together = max(1, self.step_tokens // tokens)
        alone = self.price(StepSums(0, 0, tokens, tokens * tokens / 2, 1))
        many = self.price(StepSums(0, 0, together * tokens, together * tokens * tokens / 2, together))
        return alone, max(min(alone, many / together), self.transfer)


def parted(search: Search, found: Iterable[Loaded], slo: Slo) -> list[Candidate]:
    """All of these with prompts and answers apart, each with the best number of replicas for prompts."""
    load = search.workload
    if not load.is_closed_loop or load.shared_prefix or len(search.machine) < FEWEST_GPUS:
        return []
    return [min(_ways(search, each), key=lambda way: order(way, slo)) for each in found if _can(each)]


def _can(loaded: Loaded) -> bool:
    plain = loaded.stages == loaded.attention_ranks == 1
    return plain and loaded.replicas > 1 and loaded.engine.has_disaggregation


def _ways(search: Search, loaded: Loaded) -> Iterator[Candidate]:
    load, fitted = search.workload, loaded.fit
    share = dataclasses.replace(load, concurrency=-(-load.concurrency // loaded.replicas))
    formats, experts = (fitted.weight_format, fitted.kv_format), loaded.tp if loaded.expert_parallel else 1
    made = predictor(loaded.spec, loaded.group, loaded.tp, loaded.engine.name, share, *formats, experts)
    tokens, price = profile(loaded.engine.name).rules.max_batched_tokens, made.price()
    sent, room = _transfer(search.machine, loaded), max(1.0, fitted.kv_tokens / (load.mean_input + load.mean_output))
    for prompts in range(1, loaded.replicas, max(1, loaded.replicas // _MOST_WAYS)):
        answers = loaded.replicas - prompts
        yield Candidate(
            spec=search.spec,
            engine=loaded.engine,
            tp=loaded.tp,
            replicas=loaded.replicas,
            expert_parallel=loaded.expert_parallel,
            fit=fitted,
            prediction=_prediction(made, Apart(load, price, prompts, answers, sent, room, tokens)),
            workload=dataclasses.replace(load, concurrency=-(-load.concurrency // answers)),
            group=loaded.group,
            paid=search.machine,
            cost=cost(search.machine, search.tariff),
            copies=1.0,
            prompt_replicas=prompts,
        )


def _transfer(machine: Machine, loaded: Loaded) -> float:
    """Seconds that keys and values of a prompt take from rank to rank: over the network where there are boxes."""
    tokens = max(1, round(loaded.share.mean_input))
    kept = loaded.fit.layout.cache_bytes(loaded.fit.tightest.rank, tokens, loaded.fit.kv_format)
    return hand_over_seconds(sum(kept.values()), 1, machine.link(len(machine)))


def _prediction(made: Predictor, way: Apart) -> Prediction:
    lap, load = way.lap(), way.load
    queue = max(0.0, load.concurrency - way.present(lap.batch)) / lap.rate  # where the caches are full
    steps = lap.waited + lap.prompt + queue
    first, tpot, throughput = made.around(steps, lap.sent, lap.between, lap.rate * load.mean_output, _UNSEEN)
    waits = [-lap.waited * log(1 - (place + 0.5) / _QUANTILES) for place in range(_QUANTILES)]
    return Prediction(
        ttft=first,
        tpot=tpot,
        throughput=throughput,
        step=made.cost(way.decodes(lap.batch)),
        requests_ttft=tuple(max(lap.prompt, first.mid - lap.waited + wait) for wait in waits),
        requests_tpot=(tpot.mid,) * _QUANTILES,
        preemptions=0,
        cached_share=0.0,
    )
