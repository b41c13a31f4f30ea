"""Measurements as arrays: every row's TPOT and TTFT is a weighted sum over the steps of its run. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.correction import effects
from phalanx.cost.fitted import load_fitted
from phalanx.cost.kernels import CardReach, at_reach, reach_of
from phalanx.cost.price import Rates, RooflineTimes, combine, first_token_seconds
from phalanx.engine.step_sums import StepSums
from phalanx.plan.cases import Case
from phalanx.plan.predict import Predictor
from phalanx.plan.simulate import Trace, simulate
from phalanx.plan.slopes import step_slopes

Array = Any
WeighedSteps = list[tuple[StepSums, float, float]]
"""Steps with their weights in the mean TTFT and the mean TPOT."""
QUANTITIES = ("tpot", "ttft")


@dataclass(frozen=True)
class Start:
    """Where a rate starts, how far (in logarithms) it may well be off, and the most it can be. Of an H200: what
    other cards reach of it is known (`cost.kernels`). `on_any_card`: the same on every architecture.
    """

    value: float
    spread: float
    most: float | None = None
    on_any_card: bool = False

    def at(self, shift: Array) -> Array:
        if self.most is None:
            return self.value * np.exp(shift)
        return self.most / (1 + (self.most / self.value - 1) * np.exp(-shift))

    def slope(self, rate: Array) -> Array:
        """Of the rate's logarithm, by the shift."""
        return np.ones_like(rate) if self.most is None else 1 - rate / self.most


STARTS = {
    "linear_bandwidth": Start(0.85, 0.3, 1.0),
    "linear_compute": Start(0.7, 0.5, 1.0),
    "fp8_compute": Start(0.8, 0.2),
    "expert_bandwidth": Start(0.7, 0.4, 1.3),
    "expert_compute": Start(0.5, 0.5, 1.0),
    "expert_bandwidth_power": Start(0.7, 0.5, 1.0),
    "cache_bandwidth": Start(0.7, 0.4, 1.0),
    "prompt_attention": Start(0.4, 0.5, 1.0),
    "all_reduce": Start(1.0, 0.3),
    "activation_passes": Start(8.0, 0.6),
    "layer_us": Start(30.0, 0.8),
    "fp8_layer_us": Start(10.0, 0.8),
    "sparse_layer_us": Start(30.0, 1.0),
    "prompt_layer_us": Start(200.0, 1.5, on_any_card=True),
    "step_ms": Start(0.5, 1.0),
    "prompt_step_ms": Start(1.0, 1.0),
    "row_us": Start(15.0, 1.0),
    "first_token_ms": Start(15.0, 1.0, 60.0),
    "prompt_token_us": Start(2.0, 1.0),
    "routed_passes": Start(2.3, 0.4),
    "woven_layer_us": Start(15.0, 1.0),
}


class Data:
    """Cases with their traces as arrays. Where a run was measured as a whole, its TPOT stands for the seconds of the
    run over its output tokens. What was not measured is NaN. Ranks that share the experts alone, and stages of a
    pipeline, wait for each other, which is not simulated: their rows are corrected, but tell nothing of rates.
    """

    def __init__(
        self, cases: Sequence[Case], traces: Sequence[WeighedSteps], starts: dict[str, Start] = STARTS
    ) -> None:
        self.cases, self.starts = list(cases), starts
        self.effects = [tuple(effects(case.traits)) for case in cases]
        steps = [
            (row, *case.limits.of(step), first, between)
            for row, (case, trace) in enumerate(zip(cases, traces, strict=True))
            for step, first, between in trace
        ]
        columns = np.array(steps, dtype=float).T
        self.row = columns[0].astype(int)
        self.limits = RooflineTimes(*columns[1 : 1 + len(RooflineTimes._fields)])
        self.weights = {"ttft": columns[-2], "tpot": columns[-1]}
        reached = [reach_of(case.limits.gpu, case.limits.work) for case in cases]
        self.reach = CardReach(*np.array(reached, dtype=float).T)
        self.tells_rates = np.array([case.traits.attention_ranks == case.limits.stages == 1 for case in cases])
        self.prompt_tokens = np.array([case.workload.input_tokens for case in cases], dtype=float)
        self.measured = {
            "tpot": np.log([pace(case) or np.nan for case in cases]),
            "ttft": np.log([case.measurement.ttft or np.nan for case in cases]),
        }
        self.families = sorted({case.profile.family for case in cases})
        self.family = np.array([self.families.index(case.profile.family) for case in cases])
        self.engine_of_family = _engines(self.families)
        self.architectures = sorted({case.limits.gpu.architecture for case in cases})
        self.architecture = np.array([self.architectures.index(case.limits.gpu.architecture) for case in cases])

    def subset(self, rows: Array) -> Data:
        """Only these rows."""
        part = object.__new__(Data)
        part.cases, part.starts = [self.cases[row] for row in rows], self.starts
        part.effects = [self.effects[row] for row in rows]
        place = np.full(len(self.cases), -1)
        place[rows] = np.arange(len(rows))
        chosen = place[self.row] >= 0
        part.row = place[self.row[chosen]]
        part.limits = RooflineTimes(*(np.asarray(column)[chosen] for column in self.limits))
        part.weights = {name: weight[chosen] for name, weight in self.weights.items()}
        part.reach = CardReach(*(np.asarray(column)[rows] for column in self.reach))
        part.tells_rates, part.prompt_tokens = self.tells_rates[rows], self.prompt_tokens[rows]
        part.measured = {name: values[rows] for name, values in self.measured.items()}
        part.families, part.family = self.families, self.family[rows]
        part.engine_of_family = self.engine_of_family
        part.architectures, part.architecture = self.architectures, self.architecture[rows]
        return part

    def predict(self, shifts: Array) -> dict[str, Array]:
        """Logarithms of TPOT and TTFT when the rates of every row are shifted so (rows x rates)."""
        by_row = at_reach(self._fitted(shifts), self.reach)
        cost = combine(self.limits, Rates(*(np.asarray(rate)[self.row] for rate in by_row))).total
        rows = len(self.cases)
        first = np.bincount(self.row, cost * self.weights["ttft"], rows)
        return {
            "tpot": np.log(np.bincount(self.row, cost * self.weights["tpot"], rows)),
            "ttft": np.log(first + first_token_seconds(by_row, self.prompt_tokens)),
        }

    def slopes(self, shifts: Array) -> dict[str, Array]:
        """How those logarithms move with every shift (rows x rates)."""
        fitted, rows = self._fitted(shifts), len(self.cases)
        by_row, found = at_reach(fitted, self.reach), self.predict(shifts)
        steps = step_slopes(self.limits, Rates(*(np.asarray(rate)[self.row] for rate in by_row)))
        sums = {
            name: np.stack([np.bincount(self.row, slope * self.weights[name], rows) for slope in steps], axis=1)
            for name in QUANTITIES
        }
        outside = steps._fields.index("first_token_ms"), steps._fields.index("prompt_token_us")
        sums["ttft"][:, outside[0]] = 1e-3 * by_row.first_token_ms
        sums["ttft"][:, outside[1]] = 1e-6 * by_row.prompt_token_us * self.prompt_tokens
        inner = np.stack([start.slope(rate) for start, rate in zip(self.starts.values(), fitted, strict=True)], axis=1)
        return {name: values * inner / np.exp(found[name])[:, None] for name, values in sums.items()}

    def _fitted(self, shifts: Array) -> Rates:
        return Rates(*(start.at(shifts[:, index]) for index, start in enumerate(self.starts.values())))


def _engines(families: Sequence[str]) -> Array:
    """The number of every family's engine."""
    names = [family.partition("-")[0] for family in families]
    return np.array([sorted(set(names)).index(name) for name in names])


def pace(case: Case) -> float | None:
    """Seconds between tokens or, of a run that was measured as a whole, over the output tokens of one replica; of a
    closed loop, of one client.
    """
    row = case.measurement
    if row.tpot is not None or row.throughput is None:
        return row.tpot
    return (row.batches if case.runs_once else row.concurrency) / row.throughput


def summarise(trace: Trace) -> WeighedSteps:
    """Steps that are alike as one, with their weights in the mean TTFT and the mean TPOT."""
    return _as_few(zip(trace.steps, *trace.step_weights(), strict=True))


def weigh(case: Case) -> WeighedSteps:
    """The steps of a case; of a run that was measured as a whole, each counts in its length."""
    if not case.runs_once:
        return summarise(_trace(case))
    whole = _trace(case)
    outputs = sum(passage.output_tokens for passage in whole.passages)
    if case.measurement.kind != "burst":
        return _as_few((step, 0.0, count / outputs) for step, count in zip(whole.steps, whole.repeats, strict=True))
    first, (opens, closes) = simulate(*case.first_key), whole.together
    steps = sum(whole.repeats[opens:closes])
    return [
        *_as_few((step, count, 0.0) for step, count in zip(first.steps, first.repeats, strict=True)),
        *_as_few((whole.steps[place], 0.0, whole.repeats[place] / steps) for place in range(opens, closes)),
    ]


def _trace(case: Case) -> Trace:
    """By the clock, steps are taken when they were by the numbers fitted last."""
    if case.workload.is_closed_loop:
        return simulate(*case.trace_key)
    priced = Predictor(case.limits, case.traits, load_fitted())
    return simulate(*case.trace_key, priced.price())


def _as_few(steps: Iterable[tuple[StepSums, float, float]]) -> WeighedSteps:
    alike: dict[tuple[int, ...], WeighedSteps] = {}
    for step, first, between in steps:
        if first > 0 or between > 0:
            alike.setdefault(_likeness(step), []).append((step, first, between))
    return [_mean_step(group) for group in alike.values()]


def _likeness(step: StepSums) -> tuple[int, ...]:
    sizes = (step.decodes, 0.15), (step.prompt_tokens, 0.12), (step.context, 0.6), (step.prompt_pairs, 0.6)
    return (min(step.prompts, 3), *(round(float(np.log1p(size)) / grain) for size, grain in sizes))


def _mean_step(group: WeighedSteps) -> tuple[StepSums, float, float]:
    firsts, betweens = sum(first for _, first, _ in group), sum(between for *_, between in group)
    shares = [first / (firsts or 1.0) + between / (betweens or 1.0) for _, first, between in group]
    total = sum(shares)

    def mean(name: str) -> float:
        return sum(getattr(step, name) * share for (step, *_), share in zip(group, shares, strict=True)) / total

    fields = ("decodes", "context", "prompt_tokens", "prompt_pairs", "prompts")
    return StepSums(*(mean(name) for name in fields)), firsts, betweens  # type: ignore[arg-type]


def load_data(cases: Sequence[Case], starts: dict[str, Start] = STARTS) -> Data:
    """Simulate what the cases need, each closed loop once."""
    known: dict[Any, WeighedSteps] = {}
    for case in cases:
        if (case.measurement.kind, case.trace_key) not in known:
            known[case.measurement.kind, case.trace_key] = weigh(case)
    return Data(cases, [known[case.measurement.kind, case.trace_key] for case in cases], starts)
