"""Corrections that never turn more work into less time.

Fitted corrections lean on the length of prompts and the number of clients, each and in pairs, and may fall faster than
the work behind them grows. Over a grid of both, the corrected time is held between the two nearest grids that nowhere
fall, and a correction is moved by as much.
"""

from __future__ import annotations

from itertools import accumulate
from math import exp, log, log2

LENGTHS = tuple(128 << power for power in range(7))
CLIENTS = tuple(1 << power for power in range(10))
"""Beyond the ends corrections stay as they are there."""
_GROWS = 0.9
"""A simulation may grow a little less, as a logarithm, than what is told of it without one."""
Grid = list[list[float]]
"""By length and by clients."""


def adjustment(corrections: Grid, seconds: Grid, length: float, clients: float) -> float:
    """The factor on a correction at this point. Corrections are logarithms, up to a constant; `seconds` are what they
    correct, as far as that can be told without a simulation.
    """
    corrected = [
        [correction + _GROWS * log(second) for correction, second in zip(*rows, strict=True)]
        for rows in zip(corrections, seconds, strict=True)
    ]
    rising = _rising(corrected)
    if rising == corrected:
        return 1.0
    moved = [[middle - own for middle, own in zip(*rows, strict=True)] for rows in zip(rising, corrected, strict=True)]
    return exp(_between(moved, length, clients))


def _rising(grid: Grid) -> Grid:
    """Midway between the least grid above this one and the greatest below it that never fall."""
    above, below = _least_above(grid), _turned(_least_above(_turned(grid)))
    return [[(high + low) / 2 for high, low in zip(*rows, strict=True)] for rows in zip(above, below, strict=True)]


def _least_above(grid: Grid) -> Grid:
    rows = [accumulate(row, max) for row in grid]
    columns = [accumulate(column, max) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _turned(grid: Grid) -> Grid:
    """Upside down and from the far corner: what was above is below."""
    return [[-value for value in reversed(row)] for row in reversed(grid)]


def _between(grid: Grid, length: float, clients: float) -> float:
    """At a point between those of the grid, straight in logarithms."""
    row, down = _place(length, LENGTHS)
    column, right = _place(clients, CLIENTS)
    upper = grid[row][column] * (1 - right) + grid[row][column + 1] * right
    lower = grid[row + 1][column] * (1 - right) + grid[row + 1][column + 1] * right
    return upper * (1 - down) + lower * down


def _place(value: float, marks: tuple[int, ...]) -> tuple[int, float]:
    """The mark below a value, and how far on to the next it is."""
    steps = log2(min(max(value, marks[0]), marks[-1]) / marks[0])
    index = min(int(steps), len(marks) - 2)
    return index, steps - index
