"""How long a fixed batch takes: one run, timed by the wall and by the clocks of the same steps."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.engine.core import Engine
from phalanx.engine.output import NO_TOKEN, Output
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Totals
from phalanx.engine.step_sums import StepSums
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class FixedBatch:
    """A batch of equal requests: `8x256x64` is 8 requests of 256 tokens in and 64 out."""

    batch: int
    inputs: int
    outputs: int

    @classmethod
    def parse(cls, text: str) -> FixedBatch:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip())
        if found is None or int(found.group(3)) < 2:
            raise ConfigError(
                "bad_case", f"{text!r} is no case.", "Write BATCHxINPUTxOUTPUT with at least 2 outputs, as 8x256x64."
            )
        return cls(*map(int, found.groups()))

    @property
    def prompts(self) -> StepSums:
        """All prompts, as if in one step."""
        pairs = self.batch * self.inputs * (self.inputs + 1) / 2
        return StepSums(prompt_tokens=self.batch * self.inputs, prompt_pairs=pairs, prompts=self.batch)

    @property
    def decode_step(self) -> StepSums:
        """The step in the middle of the answers."""
        return StepSums(self.batch, self.batch * (self.inputs + self.outputs // 2))

    def __str__(self) -> str:
        return f"{self.batch}x{self.inputs}x{self.outputs}"


class Clocks(NamedTuple):
    """Seconds of steps by part, from rank 0's own clocks."""

    schedule: float = 0.0
    launch: float = 0.0
    device: float = 0.0
    all_reduce: float = 0.0
    sample: float = 0.0
    draft: float = 0.0

    @classmethod
    def of(cls, totals: Totals) -> Clocks:
        return cls(
            totals.schedule_s, totals.launch_s, totals.device_s, totals.all_reduce_s, totals.sample_s, totals.draft_s
        )

    def since(self, before: Clocks) -> Clocks:
        return Clocks(*(now - then for now, then in zip(self, before, strict=True)))

    def busy(self, on_gpu: bool) -> float:
        """The host of a GPU works while that does: only what the GPU does adds up."""
        return self.device + self.sample + self.draft if on_gpu else sum(self)


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: until every request has its `first` token, and of the `whole`. `prompt_clocks` are those of
    the steps up to then.

    The window is what lies between the step that ends the last prompt and the first end of a request: in all its
    `steps` all requests decode. It takes `decode` seconds by the wall, brings each request `tokens`, and
    `decode_clocks` are those of the same steps. The first and the last of the first tokens are `apart` by so many
    steps; where an answer ends before that, there is no window.
    """

    first: float
    whole: float
    prompt_clocks: Clocks
    decode: float
    steps: int
    tokens: float
    decode_clocks: Clocks
    apart: int

    @property
    def tpot(self) -> float:
        if not self.steps:
            raise ConfigError(
                "answers_too_short",
                f"An answer ends before the last prompt, {self.apart} steps behind the first: never do all decode.",
                f"Let answers have more than {self.apart + 1} tokens; the more, the surer the figures.",
            )
        return self.decode / self.tokens

    def clocked(self, on_gpu: bool) -> float:
        """TPOT by the clocks of the steps: what it lacks to that by the wall lies between steps."""
        return self.tpot * self.decode_clocks.busy(on_gpu) / self.decode


def time_case(
    engine: Engine, case: FixedBatch, repeats: int, one_prompt: bool = False, warm_up: int = 0, iterations: int = 0
) -> Timing:
    """The fastest of some runs, each with fresh random prompts; of as many that they have timed so many `iterations`.

    A run that does not count comes first, of at least `warm_up` steps, and long enough for all to decode together, as
    they do in most steps.
    """
    prompt_steps = case.batch * case.inputs // engine.scheduler.limits.max_num_batched_tokens
    decodes = max(2 * prompt_steps + 4, warm_up)
    time_requests(engine, [(case.inputs, min(case.outputs, decodes))] * case.batch, seed=0)
    preemptions, runs = engine.scheduler.preemptions, list[Timing]()
    while len(runs) < repeats or (runs[-1].steps and sum(run.steps for run in runs) < iterations):
        runs.append(time_requests(engine, [(case.inputs, case.outputs)] * case.batch, len(runs), one_prompt))
    if engine.scheduler.preemptions > preemptions:
        raise ConfigError(
            "no_room", f"The KV cache has no room for all of {case} at once.", "Ask for fewer or shorter requests."
        )
    return min(runs, key=lambda run: run.whole)


def time_prompts(engine: Engine, case: FixedBatch, repeats: int, one_prompt: bool = False) -> float:
    """Seconds of the prompts alone: of the fastest run with one token each."""
    lengths = [(case.inputs, 1)] * case.batch
    return min(time_requests(engine, lengths, run, one_prompt).first for run in range(repeats))


def time_requests(engine: Engine, lengths: Sequence[tuple[int, int]], seed: int, one_prompt: bool = False) -> Timing:
    """A run of greedy requests of these (input, output) lengths, all there from the start.

    With `one_prompt` all begin with the same tokens: a model of experts then needs few of them in a step.
    """
    rng = random.Random(seed)
    longest = max(inputs for inputs, _ in lengths)
    shared = [rng.randrange(engine.vocab) for _ in range(longest)] if one_prompt else None
    prompts = [
        shared[:inputs] if shared else [rng.randrange(engine.vocab) for _ in range(inputs)] for inputs, _ in lengths
    ]
    with settled_memory():
        moments = [_Moment.now(engine)]
        requests = [
            engine.add(prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs))
            for prompt, (_, outputs) in zip(prompts, lengths, strict=True)
        ]
        while engine.has_work:
            brought = engine.step()
            moments.append(_Moment.now(engine, brought))
    return _timing(moments, len(requests))


class _Moment(NamedTuple):
    """Behind a step: the wall, the books of all steps that were read, and what this one brought."""

    wall: float
    finished: int
    clocks: Clocks
    brought: Sequence[Output]

    @classmethod
    def now(cls, engine: Engine, brought: Sequence[Output] = ()) -> _Moment:
        return cls(time.perf_counter(), engine.totals.finished, Clocks.of(engine.totals), brought)


def _timing(moments: Sequence[_Moment], requests: int) -> Timing:
    begun: dict[int, int] = {}
    ended: list[int] = []
    for place, moment in enumerate(moments):
        for output in moment.brought:
            begun.setdefault(output.request_id, place)
            if output.finish_reason is not None:
                ended.append(place)
    all_begun, start = max(begun.values()), moments[0]
    opens, closes = moments[all_begun], moments[max(all_begun, min(ended))]
    within = moments[all_begun + 1 : min(ended) + 1]
    made = sum(output.token != NO_TOKEN for moment in within for output in moment.brought)
    return Timing(
        first=opens.wall - start.wall,
        whole=moments[-1].wall - start.wall,
        prompt_clocks=opens.clocks.since(start.clocks),
        decode=closes.wall - opens.wall,
        steps=closes.finished - opens.finished,
        tokens=made / requests,
        decode_clocks=closes.clocks.since(opens.clocks),
        apart=opens.finished - moments[min(begun.values())].finished,
    )


@contextmanager
def settled_memory() -> Iterator[None]:
    """What has been made so far is kept from the garbage collector, as a server does once it has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
