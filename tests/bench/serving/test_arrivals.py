"""Requests are due at the rate asked for, as evenly or unevenly as asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.bench.serving.arrivals import arrival_times


def test_without_a_rate_all_are_due_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrival_times(5, 4.0, math.inf) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("burstiness", [1e-4, 0.2, 1.0, 50.0, math.inf])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_the_offered_rate_is_exact(burstiness: float, count: int) -> None:
    times = arrival_times(count, 8.0, burstiness)
    assert len(times) == count
    assert times[0] == 0.0
    assert times[-1] == pytest.approx((count - 1) / 8.0)
    assert times == sorted(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_does(burstiness: float) -> None:
    """Its standard deviation over its mean is one over the root of the shape."""
    gaps = np.diff(arrival_times(20_001, 10.0, burstiness, seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_gaps_have_no_memory() -> None:
    """The share of gaps over x is exp(-rate x)."""
    gaps = np.diff(arrival_times(20_001, 2.0, 1.0, seed=5))
    for x in (0.1, 0.5, 1.0, 2.0):
        assert (gaps > x).mean() == pytest.approx(math.exp(-2 * x), abs=0.01)


def test_the_seed_decides() -> None:
    assert arrival_times(10, 1.0, seed=1) == arrival_times(10, 1.0, seed=1) != arrival_times(10, 1.0, seed=2)
