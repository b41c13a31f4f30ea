"""Predictions: the scheduler's steps priced, corrected by what was measured, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import exp

from phalanx.cost.correction import Traits, leans, traits_of
from phalanx.cost.fitted import Fitted, Quantity, fitted_for
from phalanx.cost.kernels import at_reach, reach_of
from phalanx.cost.monotone import CLIENTS, LENGTHS, Grid, adjustment
from phalanx.cost.price import Rates, Roofline, StepCost, combine, first_token_seconds
from phalanx.cost.profiles import all_reduce_of, habits_of, profile
from phalanx.cost.quick import QuickPrice
from phalanx.cost.rules import Rules
from phalanx.cost.work import attention_parallel, count_work, pipelined
from phalanx.engine.step_sums import StepSums
from phalanx.plan.flow import Flow
from phalanx.plan.scheduled import Room
from phalanx.plan.simulate import StepPrice, Times, Trace, WaitingPrice, simulate
from phalanx.plan.speculated import SpeculativePrice, drafting_work
from phalanx.plan.steady import SteadyWatch
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload


@dataclass(frozen=True)
class Interval:
    """A value and the bounds that hold nine in ten."""

    mid: float
    low: float
    high: float

    @classmethod
    def around(cls, mid: float, half_width: float) -> Interval:
        """`half_width` is a logarithm."""
        return cls(mid, mid * exp(-half_width), mid * exp(half_width))

    def times(self, factor: float) -> Interval:
        return Interval(self.mid * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Prediction:
    """What one replica delivers: mean seconds to the first token and between tokens, output tokens a second.

    `step` is a decode step in the middle of an answer, by what its seconds go to. Not `is_held`: requests arrive faster
    than they are answered, and everything grows for as long as they do.
    """

    ttft: Interval
    tpot: Interval
    throughput: Interval
    step: StepCost
    requests_ttft: tuple[float, ...]
    requests_tpot: tuple[float, ...]
    preemptions: int
    cached_share: float
    is_held: bool = True

    @property
    def all_reduce_share(self) -> float:
        """Of a decode step."""
        return self.step.all_reduce / self.step.total


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed; of none, 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def predict(
    spec: ModelSpec,
    machine: Machine,
    tp: int,
    engine: str = "vllm",
    workload: Workload | None = None,
    weights: str | None = None,
    kv: str = "bf16",
    ep: int = 1,
    version: str = "",
    kv_tokens: int | None = None,
    watch: SteadyWatch | None = None,
    stages: int = 1,
    attention_ranks: int = 1,
) -> Prediction:
    """One replica of `tp` GPUs under a workload. `kv_tokens` is the room of its KV cache; None: it never runs out.
    `watch`: how long to look at arrivals without end. Of a pipeline of `stages` with `tp` GPUs each, or of
    `attention_ranks` that have sequences of their own, one of the batches that move together.
    """
    workload = workload or Workload()
    made = predictor(spec, machine, tp, engine, workload, weights, kv, ep, version, stages, attention_ranks)
    rules = profile(engine, version).rules
    if workload.is_endless:
        made = made.under(made.in_flight(workload, rules, kv_tokens))
    return made.predict(workload, rules, kv_tokens, watch)


def capacity(
    spec: ModelSpec,
    machine: Machine,
    tp: int,
    engine: str,
    workload: Workload,
    weights: str,
    kv: str,
    ep: int,
    kv_tokens: int | None,
    stages: int = 1,
    attention_ranks: int = 1,
) -> float:
    """Requests a second that one batch can hold: by what a full one does, and by what one at that rate would."""
    made = predictor(spec, machine, tp, engine, workload, weights, kv, ep, "", stages, attention_ranks)
    rules, together = profile(engine).rules, made.together
    full = replace(workload, concurrency=Room.of(workload, rules, kv_tokens).sequences)
    most = Flow.of(full, rules, kv_tokens, made.under(full).price(), together).capacity
    load = made.under(full).in_flight(replace(workload, rate=most), rules, kv_tokens)
    return min(most, Flow.of(load, rules, kv_tokens, made.under(load).price(), together).capacity)


def predictor(
    spec: ModelSpec,
    machine: Machine,
    tp: int,
    engine: str,
    workload: Workload,
    weights: str | None = None,
    kv: str = "bf16",
    ep: int = 1,
    version: str = "",
    stages: int = 1,
    attention_ranks: int = 1,
) -> Predictor:
    """What prices the steps of one replica of `tp` GPUs, of a pipeline of `stages` times as many."""
    weights = weights or spec.number_format
    group = machine.take(tp)
    slowest = min(group.gpus, key=lambda gpu: (gpu.bandwidth, gpu.peak("bf16")))
    found = profile(engine, version)
    if attention_ranks > 1:
        work = attention_parallel(spec.without_drafts, attention_ranks, weights, kv)
    else:
        work = pipelined(count_work(spec.without_drafts, tp, weights, kv), stages)
    publisher = "phalanx" if engine == "phalanx" and tp == 1 else ""  # on several GPUs it was not measured
    traits = traits_of(
        spec.in_format(weights), found.family, version, slowest.name, tp, ep, workload, publisher, attention_ranks
    )
    between = machine.link(tp * stages) if stages > 1 else None
    limits = Roofline(
        work,
        slowest,
        machine.link(tp),
        all_reduce_of(found, slowest.capability),
        machine.calibration,
        stages,
        between,
        habits_of(found, spec.has_states),
    )
    drafting = drafting_work(spec, tp, weights, kv, slowest.capability if engine == "phalanx" else "")
    made_by = replace(limits, work=drafting) if drafting else None
    return Predictor(limits, traits, fitted_for(engine, slowest.name), made_by, stages * attention_ranks)


@dataclass(frozen=True)
class Predictor:
    """Prices the steps of one deployment with fitted numbers. `drafting` makes a draft; None: it costs nothing. As many
    batches as move `together` wait for each other's prompts.
    """

    limits: Roofline
    traits: Traits
    fitted: Fitted
    drafting: Roofline | None = None
    together: int = 1

    def cost(self, step: StepSums) -> StepCost:
        return combine(self.limits.of(step), self._rates)

    @cached_property
    def _rates(self) -> Rates:
        rates = self.fitted.family_rates(self.traits.family, self.limits.gpu.architecture)
        return at_reach(rates, reach_of(self.limits.gpu, self.limits.work))

    def under(self, workload: Workload) -> Predictor:
        """The same deployment under another load."""
        return replace(self, traits=replace(self.traits, workload=workload))

    def in_flight(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> Workload:
        """Arrivals by the clock, with as many requests at once as are in the batch at their rate."""
        flow = Flow.of(workload, rules, kv_tokens, self.price(), self.together)
        return replace(workload, concurrency=flow.sequences(workload.rate or 0.0))

    def seconds(self, step: StepSums) -> Interval:
        """Of a step, corrected by what was measured of steps like it."""
        return Interval.around(self.price()(step), self._half_width(self.fitted.tpot))

    def predict(
        self, workload: Workload, rules: Rules, kv_tokens: int | None, watch: SteadyWatch | None = None
    ) -> Prediction:
        factor = self._between_correction
        rates = self._rates
        price = self._waiting(self.price(), workload, rules, kv_tokens)
        trace = _trace(workload, rules, kv_tokens, price, watch)
        times = trace.times(price)
        outside = first_token_seconds(rates, workload.input_tokens)
        first = self._first_correction
        ttft = (times.mean_ttft / factor + outside) * first
        stretch = ttft / times.mean_ttft if times.mean_ttft else 1.0
        return Prediction(
            ttft=Interval.around(ttft, self._half_width(self.fitted.ttft)),
            tpot=Interval.around(times.mean_tpot, self._half_width(self.fitted.tpot)),
            throughput=self._throughput(times, ttft, workload),
            step=self.cost(_typical_step(workload, trace)),
            requests_ttft=tuple(value * stretch for value in times.ttft),
            requests_tpot=tuple(times.tpot),
            preemptions=trace.preemptions,
            cached_share=trace.cached_tokens / trace.prompt_tokens if trace.prompt_tokens else 0.0,
            is_held=trace.is_steady,
        )

    def around(
        self, steps: float, sent: float, between: float, throughput: float, wider: float
    ) -> tuple[Interval, Interval, Interval]:
        """TTFT, TPOT and throughput of steps that were priced elsewhere; keys and values are `sent` in between."""
        load, first, rest = self.traits.workload, self.fitted.ttft, self.fitted.tpot
        outside = first_token_seconds(self._rates, load.input_tokens)
        ttft = (steps / self._between_correction + outside) * self._first_correction + sent
        half = wider * self._half_width(rest)
        return (
            Interval.around(ttft, wider * self._half_width(first)),
            Interval.around(between, half),
            Interval.around(throughput, half),
        )

    def _waiting(self, price: StepPrice, workload: Workload, rules: Rules, kv_tokens: int | None) -> StepPrice:
        """With what steps wait for prompts of other batches; where all requests are alike, those come together."""
        if self.together == 1 or (workload.is_closed_loop and not workload.spread):
            return price
        flow = Flow.of(workload, rules, kv_tokens, self._alone(price), self.together)
        return WaitingPrice(price, flow.wait(min(flow.room.sequences, workload.concurrency)))

    def _alone(self, price: StepPrice) -> StepPrice:
        """What one batch does that others wait for: of ranks that share experts, all but those, who have as much to do
        wherever the tokens come from.
        """
        work = self.limits.work
        if work.attention_ranks == 1:
            return price
        return QuickPrice(replace(self.limits, work=work.without_experts), self._rates, self._between_correction)

    def run_seconds(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> Interval:
        """Of the whole run, first request to last token."""
        trace = _closed_loop(workload, rules, kv_tokens)
        seconds = trace.times(self.price()).seconds
        return Interval.around(seconds, self._half_width(self.fitted.tpot))

    def decoding_together(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> Interval:
        """Between tokens, of requests that all came at once, while all of them decode."""
        trace = _closed_loop(workload, rules, kv_tokens)
        clock, (opens, closes) = trace.clock(self.price()), trace.together
        seconds = (clock[closes] - clock[opens]) / sum(trace.repeats[opens:closes])
        return Interval.around(seconds, self._half_width(self.fitted.tpot))

    def first_run(self, seconds: float, prompt_tokens: int) -> Interval:
        """TTFT of the last request of a batch, from the seconds of a run that ends with its first token."""
        steps = seconds / self._between_correction
        mid = (steps + first_token_seconds(self._rates, prompt_tokens)) * self._first_correction
        return Interval.around(mid, self._half_width(self.fitted.ttft))

    def price(self) -> StepPrice:
        """Seconds of a step, corrected, no less than the data sheet allows. With drafts, of a token of each row: they
        are made inside a step that the host prepares once.
        """
        rates, factor = self._rates, self._between_correction
        plain, workload = QuickPrice(self.limits, rates, factor), self.traits.workload
        if workload.acceptance is None:
            return plain
        drafting = QuickPrice(self.drafting, rates.without_host, factor) if self.drafting else lambda step: 0.0
        return SpeculativePrice(plain, drafting, workload.acceptance, workload.drafts)

    @cached_property
    def _between_correction(self) -> float:
        """Of steps. More clients and longer prompts never make them shorter."""
        decodes, prompts = self._steps_alone
        load = self.traits.workload
        beside = 0.5 / load.mean_output if load.spread else 0.0  # where all are alike, prompts come together
        seconds = [
            [decode + (clients - 1) * beside * prompt for decode, clients in zip(row, CLIENTS, strict=True)]
            for row, prompt in zip(decodes, prompts, strict=True)
        ]
        return self._corrected(self.fitted.tpot, seconds)

    @cached_property
    def _first_correction(self) -> float:
        """Of the time to the first token, likewise."""
        decodes, prompts = self._steps_alone
        seconds = [
            [
                first_token_seconds(self._rates, length) + prompt + (1 - 1 / clients) * decode
                for decode, clients in zip(row, CLIENTS, strict=True)
            ]
            for row, prompt, length in zip(decodes, prompts, LENGTHS, strict=True)
        ]
        return self._corrected(self.fitted.ttft, seconds)

    @cached_property
    def _steps_alone(self) -> tuple[Grid, list[float]]:
        """Seconds, uncorrected, of a decode by length and clients, and of a prompt by length."""
        half, price = self.traits.workload.mean_output / 2, QuickPrice(self.limits, self._rates, 1.0)
        decodes = [[price(StepSums(many, many * (length + half))) for many in CLIENTS] for length in LENGTHS]
        return decodes, [price(StepSums(0, 0, length, length * length / 2, 1)) for length in LENGTHS]

    def _corrected(self, quantity: Quantity, seconds: Grid) -> float:
        plain, load = quantity.correction(self.traits), self.traits.workload
        if not leans(self.traits):
            return plain
        leaning = quantity.leaning(self.traits, LENGTHS, CLIENTS)
        return plain * adjustment(leaning, seconds, load.input_tokens, load.concurrency)

    def _half_width(self, quantity: Quantity) -> float:
        return quantity.width.half(self.traits.family, self.fitted.new_of(self.traits))

    def _throughput(self, times: Times, ttft: float, workload: Workload) -> Interval:
        """In a closed loop, tokens in flight over the time an answer takes, but no more than the steps make; by the
        clock, what arrived and was done; at a steady rate, what arrives.
        """
        between = self._half_width(self.fitted.tpot)
        if workload.is_endless:
            return Interval.around((workload.rate or 0.0) * workload.mean_output, 0.0)
        simulated = times.output_tokens / times.seconds if times.seconds else 0.0
        if not workload.is_closed_loop or workload.total_requests <= workload.concurrency:
            return Interval.around(simulated, between)
        rest = (workload.mean_output - 1) * times.mean_tpot
        answer, corrected = times.mean_ttft + rest, ttft + rest
        return Interval.around(simulated * min(1.0, answer / corrected), between)


def _trace(
    workload: Workload, rules: Rules, kv_tokens: int | None, price: StepPrice, watch: SteadyWatch | None
) -> Trace:
    if not workload.is_closed_loop:
        return simulate(workload, rules, kv_tokens, price, watch)
    if kv_tokens is not None and kv_tokens >= workload.concurrency * (workload.longest + 16):
        kv_tokens = None
    return _closed_loop(workload, rules, kv_tokens)


@lru_cache(maxsize=1024)
def _closed_loop(workload: Workload, rules: Rules, kv_tokens: int | None) -> Trace:
    """The steps of a closed loop do not depend on their price, so every GPU, TP and format shares them."""
    return simulate(workload, rules, kv_tokens)


def _typical_step(workload: Workload, trace: Trace) -> StepSums:
    """A decode of as many sequences as there are on average, each in the middle of its answer."""
    counted = list(zip(trace.steps, trace.repeats, strict=True))
    decoded = sum(step.decodes * repeats for step, repeats in counted)
    steps = sum(repeats for step, repeats in counted if step.decodes)
    rows = max(1, round(decoded / steps)) if steps else 1
    context = sum(step.context * repeats for step, repeats in counted) / decoded if decoded else workload.longest
    return StepSums(rows, rows * context)
