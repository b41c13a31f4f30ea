"""A plan in words: why this one wins, what to relax when nothing does, what would be enough when nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import ceil

from phalanx.plan.candidates import SECONDS_PER_DAY, Candidate, Excluded, Plan
from phalanx.plan.engines import ENGINES, GIB
from phalanx.plan.fit import fit
from phalanx.plan.search import predict_replica
from phalanx.plan.shapes import MOST_RANKS, shape
from phalanx.plan.steady import SteadyWatch
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

_HALVINGS = 8
_MARGIN = 1.02
"""A relaxed goal is this much above what is predicted."""
_SMALLER_FORMATS = ("fp8", "awq")


def verdict(plan: Plan) -> str:
    """One sentence to act on: what to run and what it gives, or by how much it misses."""
    best = plan.best
    if best is None:
        near = nearest(plan.excluded)
        if not near or near[0].short_bytes is None:
            return (
                f"{plan.model} does not run on {plan.machine.name}: {near[0].found if near else 'nothing was tried.'}"
            )
        way = f"{ENGINES[near[0].engine].title} in {near[0].weight_format} at TP={near[0].tp}"
        short = near[0].short_bytes / GIB
        return f"{plan.model} does not fit {plan.machine.name}: the nearest, {way}, is {short:.1f} GiB a GPU short."
    if not best.is_held:
        return _cannot_hold(plan, best)
    found, price = best.prediction, best.usd_per_million
    money = "" if price is None else f", {price:,.2f} $ a million tokens"
    met = "" if plan.feasible else ", but misses the SLO"
    return (
        f"{plan.model} fits {plan.machine.name}{met}: run {best.engine.title} in {best.weight_format} at TP="
        f"{best.degrees} x {best.replicas} for about {best.throughput:,.0f} tokens/s (TTFT "
        f"{found.ttft.mid * 1e3:,.0f} ms, TPOT {found.tpot.mid * 1e3:.1f} ms, 90 % within "
        f"{found.tpot.low * 1e3:.1f}-{found.tpot.high * 1e3:.1f}){money}."
    )


def _cannot_hold(plan: Plan, best: Candidate) -> str:
    """A rate that is too high: what the machine can hold, and how many would do."""
    needed = plan.machines_needed
    return (
        f"{plan.model} on {plan.machine.name} cannot hold {plan.workload.rate:g} requests/s: the most is "
        f"{best.capacity:.3g} requests/s, by {best.engine.title} in {best.weight_format} at TP={best.degrees} x "
        f"{best.replicas}; {needed} such machine{'s' if needed != 1 else ''} would hold it."
    )


def day(plan: Plan) -> str:
    """What a day of it is, and for arrivals at a rate how much of its capacity they take."""
    best = plan.best
    assert best is not None
    prompts = best.requests_per_s * plan.workload.mean_input * SECONDS_PER_DAY
    words = f"A day: {best.tokens_per_day / 1e6:,.1f} M output tokens from {prompts / 1e6:,.1f} M of prompts."
    if best.capacity is None or plan.workload.rate is None:
        return words
    used = plan.workload.rate / best.capacity
    needed = plan.machines_needed or 1
    boxes = f"{needed} machine{'s' if needed > 1 else ''}"
    return (
        f"{words} {plan.workload.rate:g} requests/s take {boxes}: {used:.0%} of the {best.capacity:.3g} that "
        f"{best.replicas} replica{'s' if best.replicas > 1 else ''} can hold."
    )


def nearest(excluded: Sequence[Excluded]) -> list[Excluded]:
    """What came nearest to running first; what no memory would mend last."""
    return sorted(excluded, key=lambda each: (each.short_bytes is None, each.short_bytes or 0))


def explain(plan: Plan) -> str:
    """The winner in two sentences: what each GPU holds, what a step is made of, what the next choice would give."""
    best = plan.best
    if best is None:
        return ""
    tight = best.fit.tightest
    first = (
        f"{best.label}: each GPU holds {tight.weight_bytes / GIB:.1f} GiB of weights and keeps "
        f"{max(tight.kv_bytes, 0) / GIB:.1f} GiB for KV, room for {best.fit.kv_tokens:,} tokens or "
        f"{best.fit.max_sequences} requests of {best.fit.context}."
    )
    if best.tp == 1:
        second = "With one GPU a replica there is no all-reduce"
    else:
        second = f"All-reduces take {best.prediction.all_reduce_share:.0%} of a decode step"
    rivals = [each for each in plan.side_by_side if each.tp != best.tp]
    if rivals:
        rival = max(rivals, key=lambda each: each.per_gpu)
        second += (
            f"; TP={rival.tp} x {rival.replicas} gives {rival.per_gpu / best.per_gpu - 1:+.0%} tokens a GPU at "
            f"TPOT {rival.prediction.tpot.mid * 1e3:.1f} against {best.prediction.tpot.mid * 1e3:.1f} ms"
        )
    return f"{first} {second}.{_with_prompts_apart(plan, best)}"


def _with_prompts_apart(plan: Plan, best: Candidate) -> str:
    """What replicas for prompts alone bring, or would."""
    apart = next((each for each in plan.candidates if each.prompt_replicas), None)
    if apart is None:
        return ""
    split = f"{apart.prompt_replicas} of {apart.replicas} replicas for prompts alone"
    if apart is not best:
        return (
            f" Prompts apart ({apart.label}) would give {apart.per_gpu / best.per_gpu - 1:+.0%} tokens a GPU at TPOT "
            f"{apart.prediction.tpot.mid * 1e3:.1f} ms."
        )
    whole = next((each for each in plan.candidates if not each.prompt_replicas), None)
    against = f" ({whole.label}: TPOT {whole.prediction.tpot.mid * 1e3:.1f} ms)" if whole else ""
    return f" {split} keep answers free of them: that wins here{against}."


def advice(plan: Plan) -> list[str]:
    """For an SLO that nothing meets: how far the nearest point is, and what to relax."""
    best = plan.best
    if best is None or plan.feasible:
        return []
    if not best.is_held:
        return [
            f"Ask for {best.capacity:.3g} requests/s at most, or use more GPUs: the numbers below are at that rate."
        ]
    goals = plan.slo.missed(best.prediction)
    words = [
        f"{name.upper()} {found * 1e3:.0f} ms ({found / allowed:.1f} x the goal)" for name, found, allowed in goals
    ]
    lines = [f"Nothing meets the SLO. The nearest is {best.label}: {', '.join(words)}."]
    relaxed = ",".join(f"{name}:{ceil(found * _MARGIN * 1e3)}" for name, found, _ in goals)
    lines.append(f"Relax the SLO to {relaxed}, or")
    lines.append(_lighter_traffic(plan, best) or "use faster or more GPUs: no lighter traffic meets it here.")
    return lines


def _lighter_traffic(plan: Plan, best: Candidate) -> str | None:
    """By halving, the traffic at which the nearest candidate would meet the SLO."""
    share = best.workload
    for _ in range(_HALVINGS):
        if share.trace or best.prompt_replicas or (share.rate is None and share.concurrency == 1):
            return None
        share = _halved(share)
        if plan.slo.excess(predict_replica(best, share, SteadyWatch(2))) > 1:
            continue
        if share.rate is not None:
            return f"lower the rate to {share.rate * best.copies:g} requests/s (this plan: {plan.workload.rate:g})."
        concurrency = share.concurrency * best.replicas
        return f"lower the concurrency to {concurrency} (this plan: {plan.workload.concurrency})."
    return None


def _halved(workload: Workload) -> Workload:
    if workload.rate is not None:
        return dataclasses.replace(workload, rate=workload.rate / 2)
    return dataclasses.replace(workload, concurrency=workload.concurrency // 2, requests=None)


def gpus_needed(plan: Plan) -> list[str]:
    """The smallest number of GPUs of this kind that would hold the model, in its own format and in smaller ones."""
    gpu, engine = plan.machine.smallest, ENGINES["vllm"]
    words = []
    for number_format in dict.fromkeys((plan.spec.number_format, *_SMALLER_FORMATS)):
        for tp in range(1, MOST_RANKS + 1):
            if not shape(plan.spec.in_format(number_format), tp, engine).is_legal:
                continue
            machine = Machine((gpu,) * tp)
            if fit(plan.spec, machine, tp, engine, weight_format=number_format, context=plan.context).fits:
                words.append(f"TP={tp} in {number_format}")
                break
    if not words:
        return [f"No TP degree up to {MOST_RANKS} of {gpu.name} holds it with {engine.title}; use larger cards."]
    return [f"With {engine.title}, {gpu.name} holds it at " + ", ".join(words) + "."]
