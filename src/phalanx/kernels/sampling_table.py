"""What requests ask of `draw`, a row of numbers each."""

from __future__ import annotations

import struct

import torch

GREEDY_BELOW = 1e-5
PARAMETERS = 5
TOKEN = torch.int32
"""The dtype of tokens on the device: a pool has room for as many as all sequences together may have."""

ONE = 2.0**42
"""The weight of a row's best token. Up to 2**20 of them add up without overflow."""


def pack(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> list[int]:
    """What a request asks of `draw`, as a row of its table: whole numbers, and the bits of real ones.

    A temperature of zero stands for all that are greedy.
    """
    bits = struct.unpack("3q", struct.pack("3d", temperature if temperature >= GREEDY_BELOW else 0.0, top_p, min_p))
    return [seed, top_k, *bits]
