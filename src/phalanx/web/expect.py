"""What to expect of the steps an engine runs: by the planner's cost model, or by the server's own first minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.engine.step_plan import Totals
from phalanx.engine.step_sums import StepSums
from phalanx.errors import PhalanxError
from phalanx.plan.predict import Interval, predictor
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

SECONDS_A_SIZE = 60
"""Of each batch size, how long a baseline learns."""
FEWEST = 10
_BEYOND = 1.5


class Load(NamedTuple):
    """The mean of the steps of some time, and the requests behind them.

    `prompt_share` of the steps held prompts; so many `mixed_decodes` of a step's `decodes` fell into those.
    """

    decodes: float
    context: float
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0
    prompts: float = 0.0
    prompt_share: float = 0.0
    mixed_decodes: float = 0.0
    input_tokens: float = 1024.0
    output_tokens: float = 256.0

    @classmethod
    def between(cls, before: Totals, after: Totals, input_tokens: float, output_tokens: float) -> Load | None:
        """None where no step was launched."""
        steps = after.steps - before.steps
        if steps < 1:
            return None
        decodes = after.decodes - before.decodes
        return cls(
            decodes / steps,
            (after.context - before.context) / steps,
            (after.tokens - before.tokens - decodes) / steps,
            (after.prompt_pairs - before.prompt_pairs) / steps,
            (after.prompts - before.prompts) / steps,
            (after.prompt_steps - before.prompt_steps) / steps,
            (after.mixed_decodes - before.mixed_decodes) / steps,
            input_tokens,
            output_tokens,
        )

    @property
    def tokens(self) -> float:
        return self.decodes + self.prompt_tokens


class Expected(NamedTuple):
    """Seconds between two tokens of a request, and of a step on average."""

    gap: Interval
    step_s: float


class Expectation(Protocol):
    kind: str
    """`plan` or `baseline`."""
    source: str
    """Where it comes from, in a sentence."""

    def learn(self, load: Load, gap_s: float) -> None:
        """Under this load, so much time was measured between tokens."""
        ...

    def of(self, load: Load) -> Expected | None:
        """What to expect under this load; None where nothing can be said."""
        ...


def expectation(spec: ModelSpec, device: str, tp: int) -> Expectation:
    """The plan where the planner knows the device; elsewhere the server is measured against itself."""
    if device == "cpu":
        return Baseline("The planner has no data sheet of CPUs.")
    try:
        return Planned(spec, Gpu.named(device), tp)
    except PhalanxError as error:
        return Baseline(error.found)


class Planned:
    """The planner's cost model prices the very steps that the scheduler made."""

    kind = "plan"

    def __init__(self, spec: ModelSpec, gpu: Gpu, tp: int) -> None:
        machine = Machine((gpu,) * tp)
        self.source = f"The planner's cost model of {machine.name} prices the steps that the scheduler made."
        self._predictor = predictor(spec, machine, tp, "phalanx", Workload())

    def learn(self, load: Load, gap_s: float) -> None:
        """A plan is not changed by what is measured."""

    def of(self, load: Load) -> Expected | None:
        """Every step counts for the mean step; between tokens, a step counts for as many as it decodes."""
        workload = Workload(
            max(round(load.input_tokens), 1), max(round(load.output_tokens), 1), max(round(load.decodes), 1)
        )
        priced = self._predictor.under(workload)
        parts = [(share, decodes, priced.seconds(step)) for share, decodes, step in _steps(load)]
        step_s = sum(share * seconds.mid for share, _, seconds in parts)
        weights = [decodes if load.decodes else share for share, decodes, _ in parts]
        gap = Interval(*(_mean([getattr(each, end) for *_, each in parts], weights) for end in ("mid", "low", "high")))
        return Expected(gap, step_s)


def _steps(load: Load) -> Iterator[tuple[float, float, StepSums]]:
    """The two kinds of steps: decodes alone, and with prompts. Of each its share of steps, its decodes and its mean."""
    reach = load.context / load.decodes if load.decodes else 0.0
    mixed, pure = load.prompt_share, 1 - load.prompt_share
    if pure > 0:
        rows = (load.decodes - load.mixed_decodes) / pure
        yield pure, load.decodes - load.mixed_decodes, StepSums(max(round(rows), 1), rows * reach)
    if mixed > 0:
        rows, tokens = load.mixed_decodes / mixed, round(load.prompt_tokens / mixed)
        prompts = max(round(load.prompts / mixed), 1)
        yield mixed, load.mixed_decodes, StepSums(round(rows), rows * reach, tokens, load.prompt_pairs / mixed, prompts)


def _mean(values: list[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


class Baseline:
    """A line through this server's own first minutes: seconds between tokens by tokens and positions of a step.

    It learns a minute of each batch size (by powers of two) and never again, so that what becomes slower later shows.
    Of batches far from any it has learned it says nothing.
    """

    kind = "baseline"

    def __init__(self, why: str) -> None:
        self.source = f"{why} The line is fitted to this server's own first {SECONDS_A_SIZE} s at each batch size."
        self._seen: list[tuple[Load, float]] = []
        self._learned: Counter[int] = Counter()
        self._line: NDArray[np.float64] | None = None
        self._spread = (1.0, 1.0)

    def learn(self, load: Load, gap_s: float) -> None:
        size = round(load.tokens).bit_length()
        if gap_s <= 0 or self._learned[size] >= SECONDS_A_SIZE:
            return
        self._learned[size] += 1
        self._seen.append((load, gap_s))
        if len(self._seen) >= FEWEST:
            self._fit()

    def of(self, load: Load) -> Expected | None:
        if self._line is None:
            return None
        tokens = [seen.tokens for seen, _ in self._seen]
        if not min(tokens) / _BEYOND <= load.tokens <= max(tokens) * _BEYOND:
            return None
        mid = float(_features(load) @ self._line)
        return Expected(Interval(mid, mid * self._spread[0], mid * self._spread[1]), mid)

    def _fit(self) -> None:
        rows = np.array([_features(load) for load, _ in self._seen])
        gaps = np.array([gap for _, gap in self._seen])
        self._line = line = _nonnegative_fit(rows, gaps)
        low, high = np.percentile(gaps / np.maximum(rows @ line, 1e-9), [5, 95])
        self._spread = float(min(low, 1.0)), float(max(high, 1.0))


def _features(load: Load) -> NDArray[np.float64]:
    return np.array([1.0, load.tokens, load.context])


def _nonnegative_fit(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of relative errors with no weight below zero: the best over the few sets of features there are."""
    scaled, ones = rows / values[:, None], np.ones(len(values))
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            weights = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ weights - 1) ** 2))
            if weights.min() >= 0 and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[list(chosen)] = weights
    return best
