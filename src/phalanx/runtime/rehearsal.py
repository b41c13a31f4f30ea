"""Steps that nobody asked for: by them a rank learns what memory the largest one takes, and has its kernels ready.

Their tables are zero, so every position lies in block 0, whatever a cache holds. Nothing of them is told to anyone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phalanx.engine.masks import pack
from phalanx.engine.sampling import COUNT_LIMIT, MAX_LOGPROBS, SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan

GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(top_p=0.95)


def everything(vocab: int) -> SamplingParams:
    """All that a request can ask of the sampler. Without a top-k, a CPU has the whole vocabulary to sort."""
    return SamplingParams(
        max_tokens=None,
        min_tokens=COUNT_LIMIT,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
        stop_token_ids=[0],
        logprobs=min(MAX_LOGPROBS, vocab),
        prompt_logprobs=min(MAX_LOGPROBS, vocab),
    )


def step_of(rows: Sequence[tuple[int, int]], params: SamplingParams, mask: bytes | None = None) -> StepPlan:
    """A step of rows (start, count), in slots of their own, each of which yields a token."""
    ordered = sorted(rows, key=lambda row: row[1] != 1)
    starts, counts = ([row[column] for row in ordered] for column in (0, 1))
    slots = list(range(len(ordered)))
    return StepPlan(
        step=0,
        admissions=[Admission(slot, 1, [0], 0, params) for slot in slots],
        slots=slots,
        starts=starts,
        counts=counts,
        samples=[1] * len(slots),
        new_blocks=[(slot, [0]) for slot in slots],
        masks=[] if mask is None else [(slot, 0) for slot in slots],
        new_masks=[] if mask is None else [(0, pack(mask))],
    )


def filled(seats: int, tokens: int, longest: int) -> list[tuple[int, int]]:
    """Rows of a full step: every seat has one, each at the end of the longest sequence there may be."""
    counts = [1] * min(seats, tokens)
    left = tokens - len(counts)
    for seat in reversed(range(len(counts))):
        more = min(left, longest - 1)
        counts[seat] += more
        left -= more
    return [(longest - count, count) for count in counts]


def worst_step(seats: int, tokens: int, longest: int, vocab: int) -> StepPlan:
    """The most tokens, the most rows, and everything asked of each: no step takes more memory.

    All are prompts that end in it, and but for the last token of each, all are reported on.
    """
    plan = step_of(filled(seats, tokens, longest), everything(vocab), bytes([0xFF]) * -(-vocab // 8))
    prompts = [msgspec.structs.replace(admission, prompt_length=longest) for admission in plan.admissions]
    return msgspec.structs.replace(plan, admissions=prompts, reported=list(range(len(plan.slots))))


def sweep(most: int) -> list[int]:
    """Sizes from 1 on between which no kernel changes, up to and with the largest."""
    doubled = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    between = [size for size in (96, 160, 192, 320, 384) if size < most]
    return sorted({*doubled, *between, most})


def varied_steps(seats: int, tokens: int, longest: int, vocab: int) -> list[StepPlan]:
    """Steps of all sizes, to be launched kernel by kernel: prompts from their start and resumed ones, alone and beside
    decodes, and every way to choose tokens.
    """
    steps = [step_of([(0, count)], GREEDY) for count in sweep(min(tokens, longest)) if count > 1]
    if min(tokens, longest) > 1:
        decode, resumed = (longest - 1, 1), (longest - 2, 2)
        beside = {0, *sweep(max(0, min(seats - 1, tokens - 2)))}
        steps += [step_of([decode] * rows + [resumed], DRAWN) for rows in sorted(beside)]
    asked = everything(vocab)
    ways = (GREEDY, DRAWN, asked, msgspec.structs.replace(asked, temperature=0.0))
    few = sorted({min(seats, tokens, rows) for rows in (1, 2, 3)})
    return steps + [step_of([(longest - 1, 1)] * rows, params) for rows in few for params in ways]
