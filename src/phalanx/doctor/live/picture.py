"""Picture: what a trace, or a minute of a live server, says of an engine at work. The rules read nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.doctor.live.link import LinkSeen, nodes_of, seen_link
from phalanx.engine.marks import StepTraces
from phalanx.errors import PhalanxError
from phalanx.spec.machine import Gpu, Machine
from phalanx.trace.timeline import Step, mean_period, steps_of

_MS = 1e-6
_LAUNCH_MS = 0.5
"""Of a layer of a traced step with prompts, launched kernel by kernel: arithmetic that takes less is hidden."""
_COMPUTED = ("prepare", "embedding", "sampling", "read tokens")
"""Parts of a step that every rank does alike."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ms a step, of steps that only decode where they say nothing else. What is None or empty is not known,
    and not judged.

    `worked` is what each rank did by itself in its layers, `share` its share of the weights, as the layout deals them.
    `last` is in what share of collectives each rank came last. `exchange_expected` is by the cost model of the link,
    `link` is what lies between several machines.
    `least` is the least that memory, or for prompts arithmetic, allows; `prompt_worked` is held against the latter.
    """

    ranks: int = 1
    on_gpus: bool = False
    steps: int = 0
    step: float = 0.0
    decodes: float = 0.0
    waited: float | None = None
    exchanged: float | None = None
    exchange_expected: float | None = None
    link: LinkSeen | None = None
    idle: float | None = None
    worked: list[float] = []
    share: list[float] = []
    last: list[float] = []
    least: float | None = None
    prompt_step: float | None = None
    prompt_exchanged: float | None = None
    prompt_worked: float | None = None
    prompt_least: float | None = None
    prompt_full: float | None = None
    budget: int | None = None
    waiting: float | None = None
    in_graphs: float | None = None
    preemptions: float | None = None
    repeated: float | None = None
    found: float | None = None
    token_gap: float | None = None
    expected_gap: tuple[float, float, float] | None = None


def picture_of(traces: StepTraces) -> Picture:
    """Of a trace."""
    steps = steps_of(traces)
    decodes = [step for step in steps if not step.has_prompts]
    prompts = [step for step in steps if step.has_prompts]
    chosen = decodes or prompts
    if not chosen:
        return Picture(ranks=max(1, len(traces.ranks)))
    first = traces.ranks[0]
    full = [step.host.prompt_tokens + step.host.decodes >= traces.budget for step in prompts]
    hosts, mean_weights = traces.hosts, fmean(rank.weights for rank in traces.ranks)
    return Picture(
        ranks=len(traces.ranks),
        on_gpus=first.device != "cpu",
        steps=len(steps),
        step=mean_period(chosen) * _MS,
        decodes=fmean(step.host.decodes for step in chosen),
        waited=_calls(chosen, "waited"),
        exchanged=_calls(chosen, "exchanged"),
        exchange_expected=_expected_exchange(chosen, traces),
        link=seen_link(steps, traces),
        idle=_idle(chosen),
        worked=[_worked(chosen, rank) for rank in range(len(traces.ranks))],
        share=[rank.weights / mean_weights for rank in traces.ranks] if mean_weights else [],
        last=_last(chosen, len(traces.ranks)),
        least=_least(traces) if decodes else None,
        prompt_step=mean_period(prompts) * _MS if decodes and prompts else None,
        prompt_exchanged=_calls(prompts, "exchanged") if prompts else None,
        prompt_worked=max(_worked(prompts, rank) for rank in range(len(traces.ranks))) if prompts else None,
        prompt_least=_least_of_prompts(traces, prompts) if prompts else None,
        prompt_full=fmean(full) if full else None,
        budget=traces.budget,
        waiting=fmean(host.waiting for host in hosts),
        in_graphs=None if first.in_graphs is None or not decodes else min(1.0, first.in_graphs / len(decodes)),
        preemptions=(hosts[-1].preemptions - hosts[0].preemptions) / len(hosts),
        repeated=traces.repeated_tokens / traces.prompt_tokens if traces.prompt_tokens else None,
        found=traces.found_tokens / traces.prompt_tokens if traces.prompt_tokens else None,
    )


def _calls(steps: Sequence[Step], what: str) -> float:
    """Mean over ranks: waiting for the last to come, or exchanging."""
    total = 0.0
    for step in steps:
        for call in step.calls:
            of: Callable[[int], int] = getattr(call, what)
            total += sum(map(of, range(len(call.came)))) / len(call.came)
    return total / len(steps) * _MS


def _idle(steps: Sequence[Step]) -> float:
    """How long the first rank had nothing to do before a step: the host had it wait."""
    gaps = [step.idle for step in steps if step.idle is not None]
    return fmean(gaps) * _MS if gaps else 0.0


def _worked(steps: Sequence[Step], rank: int) -> float:
    own = (part.own for step in steps for part in step.ranks[rank].slices if part.name not in _COMPUTED)
    return sum(own) / len(steps) * _MS


def _least(traces: StepTraces) -> float | None:
    """To read the weights once, where the catalogue has this GPU. Of experts it is not known how many are read."""
    gpu = _gpu(traces.ranks[0].device)
    if gpu is None or any(ffn != "Dense" for _, ffn in traces.ranks[0].parts):
        return None
    return max(rank.weights for rank in traces.ranks) / gpu.bandwidth * 1e3


def _least_of_prompts(traces: StepTraces, prompts: Sequence[Step]) -> float | None:
    """To multiply all tokens of a step at the rate of the data sheet, where that is most of what it takes."""
    first = traces.ranks[0]
    gpu = _gpu(first.device)
    if gpu is None or not first.flops:
        return None
    tokens = fmean(step.host.prompt_tokens + step.host.decodes for step in prompts)
    least = tokens * first.flops / gpu.peak(first.multiplied) * 1e3
    return least if least >= _LAUNCH_MS * len(first.parts) else None


def _gpu(device: str) -> Gpu | None:
    try:
        return None if device == "cpu" else Gpu.named(device)
    except PhalanxError:
        return None


def _last(steps: Sequence[Step], ranks: int) -> list[float]:
    found = Counter(call.last for step in steps for call in step.calls)
    total = sum(found.values())
    return [found[rank] / total for rank in range(ranks)] if total else []


def _expected_exchange(steps: Sequence[Step], traces: StepTraces) -> float | None:
    """By the cost model, where the catalogue has this GPU, and all are in one machine or known to be joined so."""
    gpu, ranks = _gpu(traces.ranks[0].device), len(traces.ranks)
    if gpu is None or ranks == 1:
        return None
    link, implementation = Machine((gpu,) * ranks).link(ranks), profile("phalanx").all_reduce
    if len(nodes_of(traces)) > 1 and link.kind != "roce":
        return None
    total = sum(all_reduce_seconds(call.size, ranks, link, implementation) for step in steps for call in step.calls)
    return total / len(steps) * 1e3
