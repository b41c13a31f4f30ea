"""Sampling worked out row by row in Python, from what its parameters are documented to mean."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.sampling_table import pack


class LatentQueries(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


KINDS = [
    LatentQueries(),
    LatentQueries(temperature=0.0, top_k=3, top_p=0.5),
    LatentQueries(top_k=50),
    LatentQueries(0.7, top_p=0.95),
    LatentQueries(top_k=50, top_p=0.95),
    LatentQueries(min_p=0.05),
    LatentQueries(1.3, 20, 0.9, 0.02),
    LatentQueries(top_p=0.9, min_p=0.1),
    LatentQueries(2.0, top_k=3000),
    LatentQueries(top_k=1),
    LatentQueries(top_p=1e-45),
    LatentQueries(top_p=1 - 1e-9),
    LatentQueries(100.0, top_p=0.99),
    LatentQueries(1e-3, top_p=0.5),
    LatentQueries(top_k=2**31),
    LatentQueries(top_p=0.5, min_p=1.0),
    LatentQueries(5.0, top_k=7, min_p=0.9),
]


def table_of(asked: list[LatentQueries]) -> Tensor:
    """With a greedy row behind them, for a slot that nobody has."""
    return torch.tensor([pack(*each) for each in asked] + [pack(*LatentQueries(temperature=0.0))])


def mixed(rows: int, seed: int = 1) -> list[LatentQueries]:
    rng = random.Random(seed)
    return [rng.choice(KINDS)._replace(seed=rng.randrange(-(2**63), 2**63)) for _ in range(rows)]


def probabilities(scores: Tensor, asked: LatentQueries) -> npt.NDArray[np.float64]:
    """Of every token of a row, in float64."""
    values = scores.double().numpy()
    logits = (values - values.max()) / asked.temperature
    chances = np.exp(logits)
    kept = chances >= asked.min_p
    if asked.top_k:
        best = np.sort(logits[kept])[::-1]
        kept &= logits >= best[min(asked.top_k, len(best)) - 1]
    if asked.top_p < 1:
        different, group = np.unique(-logits[kept], return_inverse=True)
        shares = np.bincount(group, weights=chances[kept]) / chances[kept].sum()
        before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
        kept &= logits >= -different[before < asked.top_p].max()
    chances = np.where(kept, chances, 0.0)
    return chances / chances.sum()


def random_number(seed: int, position: int) -> float:
    """splitmix64's finish over a mix of both, in Python's own whole numbers."""
    mask = 2**64 - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return ((state ^ (state >> 31)) >> 11) / 2**53


def distance(scores: Tensor, asked: LatentQueries, position: int, token: int) -> float:
    """How far the random number lies from the token's share of [0, 1): zero if it is the right one."""
    if asked.temperature == 0:
        return float(token != int(scores.float().numpy().argmax()))
    chances = probabilities(scores, asked)
    until = float(chances[: token + 1].sum())
    number = random_number(asked.seed, position)
    return 1.0 if chances[token] == 0 else max(0.0, until - float(chances[token]) - number, number - until)
