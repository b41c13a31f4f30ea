"""How fast ranks of several machines reach each other, by all-reduces of their own when they have just met."""

from __future__ import annotations

import time

import psutil
import torch
from torch import Tensor

from phalanx.engine.marks import LinkPace
from phalanx.fabric.group import FabricError, Group
from phalanx.fabric.nccl import interface_of

_SMALL, _LARGE, _LARGEST = 2**8, 2**12, 2**22
"""Bytes. Larger ones are tried until one takes long: it is mostly bytes."""
_LONG_S = 5e-3
_CALLS = 3
"""Of a size: fewer tell nothing."""
_ENOUGH_S, _MOST_S = 0.15, 0.25


def measure_pace(group: Group, device: torch.device, host: str) -> LinkPace | None:
    """All ranks have to call this at once; it takes 0.15 s, and where cores are busy 0.25 s at most, and what is under
    way then. None where the link is so slow that this says nothing.

    The fastest of a size counts: whatever else goes on makes others slower. Each large all-reduce follows a small one,
    so that no rank is late for it, and carries what its rank knows: by the sum all leave off, or go on, together.
    """
    began = time.perf_counter()
    small: list[float] = []
    large: list[float] = []
    size, spent = _LARGE, 0.0
    while spent < (_ENOUGH_S if len(large) >= _CALLS else _MOST_S):
        small.append(_timed(group, torch.zeros(1, _SMALL // 4, device=device)))
        tensor = torch.zeros(1, size // 4, device=device)
        tensor[0, 0], tensor[0, 1] = time.perf_counter() - began, min(large, default=1.0)
        large.append(_timed(group, tensor))
        spent, fastest = (float(each) / group.size for each in tensor[0, :2])
        if fastest < _LONG_S and size < _LARGEST:
            size, large = 4 * size, []
    if len(large) < _CALLS:
        return None
    latency, card = min(small), _card_rate(host) if device.type == "cpu" else 0.0
    return LinkPace(latency, size / max(min(large) - latency, 1e-9), card)


def _timed(group: Group, tensor: Tensor) -> float:
    """Seconds until the sum is there, which takes the tensor's place."""
    began = time.perf_counter()
    tensor.copy_(group.all_reduce(tensor))
    if tensor.is_cuda:
        event = torch.cuda.Event()
        event.record()
        group.wait_for(event)
    return time.perf_counter() - began


def _card_rate(host: str) -> float:
    """Bytes per second that the card with this address has agreed on with its neighbour; 0: it does not tell."""
    try:
        card = psutil.net_if_stats().get(interface_of(host))
    except FabricError:
        return 0.0
    return max(0, card.speed) * 1e6 / 8 if card else 0.0
