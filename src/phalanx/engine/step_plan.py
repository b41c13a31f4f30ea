"""StepPlan and StepResult: all that passes between engine and runner."""

from __future__ import annotations

from typing import Protocol

import msgspec

from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_sums import StepSums
from phalanx.engine.whereabouts import Where, Whereabouts
from phalanx.models.adapter import AdapterOrder

UNREAD = -2
"""In the place of a draft that the ranks know and the engine does not."""


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """A request enters the batch: told to the ranks once, they keep it by slot until the slot is given anew."""

    slot: int
    prompt_length: int
    tokens: list[int]
    seed: int
    params: SamplingParams
    adapter: int = 0


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One step, by columns: row i computes `counts[i]` tokens of slot `slots[i]` from position `starts[i]` on.

    Tokens and block tables live with the runner: a plan carries only what is new. The last `samples[i]` tokens of a row
    each yield the one behind them. Usually that is none, or one, which stays on the device for the next step. A row
    that yields more is one of drafts: it ends with tokens that were guessed, which the tokens it yields prove right or
    wrong. First come rows of one token, then those of drafts, then prompts.

    `new_blocks` are those that slots get, behind the ones they have. `told` are (slot, position, tokens) that the
    runner cannot know: drafts, and the token before them. `masks` holds, for tokens that are yielded under a grammar,
    their number among all that the step yields and the place of the mask of what they may be; `new_masks` are put into
    their places first (see `engine.masks`).

    `window_blocks` are (slot, group, blocks) for groups of layers that look back on a window; a block that is out of
    reach is any number. Of recurrent states, which lie by slot, `restored` are copied (from, to) before the step, and
    `saved` behind it. Where ranks make drafts, they make `ahead` of them for every row that yields tokens; in a step
    that is not `taken_in` nobody's drafts will ever be asked for again, and who makes them does nothing. Where
    `drafts_stay` nobody waits for them: they lie in the pool behind the tokens that stand, and rows of the next step
    that take them are not told which they are. That comes with the tokens of a step that is `reread`. `reported` are
    rows whose requests ask for more of the prompt than the token behind it.
    """

    step: int
    admissions: list[Admission]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]
    new_blocks: list[tuple[int, list[int]]]
    masks: list[tuple[int, int]] = []
    new_masks: list[tuple[int, bytes]] = []
    window_blocks: list[tuple[int, int, list[int]]] = []
    restored: list[tuple[int, int]] = []
    saved: list[tuple[int, int]] = []
    told: list[tuple[int, int, list[int]]] = []
    ahead: int = 0
    reported: list[int] = []
    taken_in: bool = True
    drafts_stay: bool = False
    reread: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def yielded(self) -> tuple[list[int], list[int]]:
        """Slots and positions of the tokens that this step yields."""
        ends = list(map(int.__add__, self.starts, self.counts))
        if self.samples.count(1) == len(self.samples):
            return self.slots, ends
        slots: list[int] = []
        positions: list[int] = []
        for slot, end, wanted in zip(self.slots, ends, self.samples, strict=True):
            slots += [slot] * wanted
            positions += range(end - wanted + 1, end + 1)
        return slots, positions

    def drafted(self) -> tuple[list[int], list[int]]:
        """Slots and positions of the drafts that rows of this step hold."""
        slots: list[int] = []
        positions: list[int] = []
        for slot, start, count, yielded in zip(self.slots, self.starts, self.counts, self.samples, strict=True):
            if yielded > 1:
                slots += [slot] * (yielded - 1)
                positions += range(start + count - yielded + 1, start + count)
        return slots, positions

    def sums(self) -> StepSums:
        """What the time of this step depends on. Rows of drafts are like as many rows of one token."""
        decodes = self.counts.count(1)
        sums = StepSums(decodes=decodes, context=sum(self.starts[:decodes]) + decodes)
        for row in range(decodes, len(self.counts)):
            start, count = self.starts[row], self.counts[row]
            if self.samples[row] > 1:
                sums.add_drafts(start, count)
            else:
                sums.add_row(start, count)
        return sums


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of a step on this rank: handing out its work, layers, waiting for other ranks, choosing tokens, drafts.

    On a GPU, `device` holds the collectives too: they run inside the same graph. `wall` is from the reading of the step
    before to that of this one, or from its launch, if nothing was to be done between; it is 0 where nobody knows. A
    step is not `steady` where it tells nothing of those to come: a graph was captured meanwhile, or kernels were
    launched one by one and those of the step before were not, or the other way round.
    """

    launch: float = 0.0
    device: float = 0.0
    all_reduce: float = 0.0
    sample: float = 0.0
    draft: float = 0.0
    wall: float = 0.0
    steady: bool = True

    @property
    def total(self) -> float:
        return self.launch + self.device + self.all_reduce + self.sample + self.draft


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that a step yields, in the order of its rows, `NO_TOKEN` where the scores are NaN or infinite, and
    drafts behind each row that yields some; and by slot, what it found out of prompts.

    `drafted` are the drafts that the rows themselves held, one row's behind the other's, where they are `reread`. An
    embedding is told where the prompt ends, as float32. `marks` are digests of what every rank must have with the
    same bits.
    """

    step: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    times: StepTimes = StepTimes()
    drafts: list[list[int]] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    embeddings: list[tuple[int, bytes]] = []
    marks: list[int] = []
    drafted: list[int] = []


class Totals(StepSums, array_like=True, kw_only=True):
    """What a rank has done since it started: the sums of all its steps, how many they were, their seconds by part.

    Only rank 0 schedules. `prompt_steps` are the steps that held a prompt, `mixed_decodes` the decodes in them. All but
    the seconds count steps when they are launched; the seconds are those of the `finished` ones.
    """

    steps: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    device_s: float = 0.0
    all_reduce_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    prompt_steps: int = 0
    mixed_decodes: int = 0
    finished: int = 0

    def launched(self, plan: StepPlan) -> None:
        sums = plan.sums()
        self.add(sums)
        self.steps += 1
        if sums.prompts:
            self.prompt_steps += 1
            self.mixed_decodes += sums.decodes

    def collected(self, result: StepResult) -> None:
        times = result.times
        self.finished += 1
        self.launch_s += times.launch
        self.device_s += times.device
        self.all_reduce_s += times.all_reduce
        self.sample_s += times.sample
        self.draft_s += times.draft


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """A rank's sign of life: the step it is in or was in last, for how long it has been busy with it, its books and
    its page.
    """

    rank: int
    step: int
    busy_s: float
    totals: Totals = msgspec.field(default_factory=Totals)
    where: Where = Where()


class Runner(Protocol):
    """Runs steps in the order they are launched. `depth` steps may be launched before the first is collected."""

    depth: int
    nodes: list[str]
    """The machine of every rank, rank 0 first; empty where all run on this one."""

    @property
    def where(self) -> Whereabouts:
        """The page of the rank in this process."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """StepMemoryError if the step found too little memory; it counts as never launched."""
        ...

    def adapt(self, order: AdapterOrder) -> None:
        """Hold an adapter on all ranks from the next step on, or hold it no longer."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step launched and not yet collected.

        StepLostError if the ranks do not agree on it.
        """
        ...

    def find_break(self, slot: int, position: int) -> str:
        """The part of the model in which the numbers of a token cease to be finite: it is computed once more."""
        ...

    def tend(self) -> bool:
        """Do a piece of the work that was put off until no request waits. Whether some is left."""
        ...

    def beats(self) -> list[Beat]:
        """Signs of life of the ranks in other processes since the last call. May be called from another thread.

        EngineDeadError if one of them is gone.
        """
        ...

    def close(self) -> None: ...
