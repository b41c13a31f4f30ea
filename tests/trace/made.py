"""Traces in virtual time: ranks that take as long as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.engine.marks import (
    CALL_ENDS,
    PLACE,
    SAMPLED,
    SAMPLING,
    HostStep,
    LinkPace,
    Mark,
    RankTrace,
    StepMarks,
    StepTraces,
)
from phalanx.engine.whereabouts import ALL_REDUCE, EMBEDDING, HEAD

LAYERS = 4
US = 1000


def make_traces(
    work_us: Sequence[float],
    exchange_us: float = 5.0,
    pause_us: float = 1.0,
    steps: int = 6,
    decodes: int = 32,
    weights: Sequence[int] = (),
    device: str = "NVIDIA H100 80GB HBM3",
    prompt_tokens: Callable[[int], int] = lambda step: 0,
    prompt_factor: float = 1.0,
    size: int = 32 * 8192 * 2,
    budget: int = 8192,
    waiting: int = 0,
    preempted: int = 0,
    in_graphs: int | None = None,
    prompts: tuple[int, int, int] = (0, 0, 0),
    flops: float = 0.0,
    nodes: Sequence[str] = (),
    paces: Sequence[LinkPace | None] = (),
) -> StepTraces:
    """Ranks that work so many us in each part of every layer, and meet after it for `exchange_us`. Between steps the
    host takes `pause_us`. A step with prompts takes `prompt_factor` as long. Weights are read at 0.7 of an H100's rate.
    """
    ranks: list[list[StepMarks]] = [[] for _ in work_us]
    hosts = []
    now = 10**12
    for number in range(1, steps + 1):
        begun, tokens = now, prompt_tokens(number)
        factor = prompt_factor if tokens else 1.0
        clocks = [begun + US] * len(work_us)
        marks: list[list[Mark]] = [[Mark(PLACE, EMBEDDING, begun + US)] for _ in work_us]
        for place in range(2 * LAYERS):
            for rank, work in enumerate(work_us):
                marks[rank].append(Mark(PLACE, place, clocks[rank]))
                clocks[rank] += int(work * factor * US)
            if len(work_us) > 1:
                there = max(clocks)
                for rank in range(len(work_us)):
                    marks[rank] += [Mark(ALL_REDUCE, size, clocks[rank])]
                    clocks[rank] = there + int(exchange_us * factor * US)
                    marks[rank] += [Mark(CALL_ENDS, 0, clocks[rank])]
        for rank in range(len(work_us)):
            ended = clocks[rank]
            marks[rank] += [Mark(PLACE, place, ended) for place in (HEAD, SAMPLING, SAMPLED)]
            ranks[rank].append(StepMarks(number, begun, ended, marks[rank]))
        now = max(clocks)
        hosts.append(
            HostStep(
                number, begun, begun, begun, now, now, decodes=decodes, prompt_tokens=tokens, running=decodes,
                waiting=waiting, free_blocks=100, preemptions=preempted * number,
            )
        )  # fmt: skip
        now += int(pause_us * US)
    parts = [("Gqa", "Dense")] * LAYERS
    held = list(weights) or [int(0.7 * min(work_us) * 2 * LAYERS * 3.35e6)] * len(work_us)
    traces = [
        RankTrace(
            rank, parts, steps, device, held[rank], in_graphs, flops=flops, node=nodes[rank] if nodes else "",
            pace=paces[rank] if paces else None,
        )
        for rank, steps in enumerate(ranks)
    ]  # fmt: skip
    return StepTraces(hosts, traces, 1000, budget, 256, *prompts)
