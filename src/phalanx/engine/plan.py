"""StepPlan and StepResult: all that passes between engine and runner."""

from __future__ import annotations

from typing import Protocol

import msgspec

from phalanx.engine.sampling import SamplingParams


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """A request enters the batch: told to the ranks once, they keep it by slot until the slot is given anew."""

    slot: int
    prompt_length: int
    tokens: list[int]
    seed: int
    params: SamplingParams


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One step, by columns: row i computes `counts[i]` tokens of slot `slots[i]` from position `starts[i]` on.

    Tokens and block tables live with the runner: a plan carries only what is new. Rows of one token come first. A row
    with `samples[i]` yields the token at position `starts[i] + counts[i]`, which stays on the device for the next step.
    `masks` holds, for rows under a grammar, their index and the tokens they may yield (see `Matcher.mask`).
    """

    step: int
    admissions: list[Admission]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    new_blocks: list[list[int]]
    masks: list[tuple[int, bytes]] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of the sampled token, and of the likeliest ones, best first."""

    sampled: float
    top: list[tuple[int, float]]


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of a step on this rank: handing out its work, layers, waiting for other ranks, choosing tokens.

    On a GPU, `device` holds the collectives too: they run inside the same graph.
    """

    launch: float = 0.0
    device: float = 0.0
    all_reduce: float = 0.0
    sample: float = 0.0


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """The sampled tokens of a step, one for each row with `samples`, in row order."""

    step: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    times: StepTimes = StepTimes()


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """A rank's sign of life: the step it is in or was in last, and for how long it has been busy with it."""

    rank: int
    step: int
    busy_s: float


class Runner(Protocol):
    """Runs steps in the order they are launched. `depth` steps may be launched before the first is collected."""

    depth: int
    nodes: list[str]
    """The machine of every rank, rank 0 first; empty where all run on this one."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest step launched and not yet collected."""
        ...

    def beats(self) -> list[Beat]:
        """Signs of life of the ranks in other processes since the last call. May be called from another thread.

        EngineDeadError if one of them is gone.
        """
        ...

    def close(self) -> None: ...
