"""When requests are due."""

from __future__ import annotations

import math

import numpy as np

_SMALLEST_GAP = 1e-300  # gaps of extreme bursts underflow to 0, and their sum must not


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each request is due; the first at once, the last at (count - 1) / rate.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, and infinity
    is one request every 1 / rate. They are stretched to the exact length, so that the rate asked for is the rate
    offered (a Poisson process stays one: given when its last event comes, the others are uniform before it).
    """
    if rate == math.inf or count == 1:
        return [0.0] * count
    if burstiness == math.inf:
        gaps = np.ones(count - 1)
    else:
        gaps = np.maximum(np.random.default_rng(seed).gamma(burstiness, size=count - 1), _SMALLEST_GAP)
    due = np.cumsum(gaps)
    return [0.0, *(due * ((count - 1) / rate / due[-1])).tolist()]
