"""What an engine and its ranks write down while steps are traced: numbers and times, from which others make slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

PLACE, CALL_ENDS = 0, -1
"""What a mark says besides the kinds of collectives: a part begins, the collective ends."""

SAMPLING, SAMPLED = -3, -4
"""Places of a step, beside those of `engine.whereabouts`."""

MOST_STEPS = 64
MOST_LAYERS = 2**14
"""Layers of all ranks and steps together, which bounds the size of a trace: some 20 MB as JSON."""


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """At `time`, in ns of the rank's clock: a part begins at the place `value`, or a collective of `value` bytes."""

    what: int
    value: int
    time: int


class StepMarks(msgspec.Struct, array_like=True):
    """A step on one rank, from the order to its tokens. A GPU's marks are of its own time, in the host's ns."""

    step: int
    begun: int
    ended: int = 0
    marks: list[Mark] = []


class LinkPace(msgspec.Struct, frozen=True):
    """What all-reduces between machines took when the ranks had just met: `latency` seconds, and `bandwidth` bytes of
    the tensor a second. The rank's network card is good for `card` bytes a second; 0: it does not tell.
    """

    latency: float
    bandwidth: float
    card: float = 0.0

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


class RankTrace(msgspec.Struct, frozen=True, tag=True):
    """`parts` are the kinds of mixer and FFN of each layer, `weights` the bytes of the rank's share, `in_graphs` how
    many of the steps ran as CUDA graphs, where there are some. The rank's clock is `ahead` ns of the engine's, give or
    take `uncertain`. A token takes `flops` of the rank, of numbers in the format `multiplied`; 0: not known. With ranks
    on several machines, `node` is its own and `pace` what it may expect of the links between them.
    """

    rank: int
    parts: list[tuple[str, str]]
    steps: list[StepMarks]
    device: str = "cpu"
    weights: int = 0
    in_graphs: int | None = None
    ahead: int = 0
    uncertain: int = 0
    flops: float = 0.0
    multiplied: str = "bf16"
    node: str = ""
    pace: LinkPace | None = None


class HostStep(msgspec.Struct, array_like=True):
    """A step as the engine saw it. Times are when its parts ended; `begun` is before it was scheduled."""

    step: int
    begun: int
    scheduled: int
    launched: int = 0
    collected: int = 0
    applied: int = 0
    decodes: int = 0
    prompt_tokens: int = 0
    prompts: int = 0
    context: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class StepTraces(msgspec.Struct, frozen=True):
    """Some steps over all ranks, and the limits of the engine that they ran in. Of the tokens of its prompts,
    `repeated` ones stand at the beginning of an earlier prompt too, and `found` ones were in the cache.
    """

    hosts: list[HostStep]
    ranks: list[RankTrace]
    blocks: int
    budget: int
    max_num_seqs: int
    prompt_tokens: int = 0
    repeated_tokens: int = 0
    found_tokens: int = 0


class Hooks:
    """Functions put around methods of single objects, and taken away again: nothing is left of them then."""

    def __init__(self) -> None:
        self._hooked: list[tuple[Any, str, Any]] = []

    def around(self, owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """`make` gets the method and returns what is called instead of it."""
        self._hooked.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, make(getattr(owner, name)))

    def remove(self) -> None:
        for owner, name, own in reversed(self._hooked):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._hooked.clear()
