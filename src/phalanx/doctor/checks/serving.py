"""A server that runs here: why its ranks were lost, and whether it does what the plan says."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.checks import fabric, gpus, links, memory, network, power, software
from phalanx.doctor.checks.measured import looks_like_timeout
from phalanx.doctor.checks.products import machine_of
from phalanx.doctor.facts import Facts, Serving
from phalanx.doctor.finding import Finding
from phalanx.models import catalog
from phalanx.plan.engines import ENGINES
from phalanx.plan.predict import Prediction, predict
from phalanx.plan.shapes import shape
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

_SUSPECTS = (
    links.nvlinks,
    links.topology,
    links.p2p,
    links.iommu,
    fabric.fabric_manager,
    fabric.fabric_state,
    power.throttle,
    power.power_limit,
    gpus.pcie_width,
    memory.unified_memory,
    software.nccl,
    network.link_speed,
    network.mtu,
    network.jumbo,
    network.roce_functions,
    network.socket_interface,
    network.rdma_devices,
    network.p2p_switched_off,
)
"""What slows or stops a group of ranks, the likeliest first."""
_TIMED_OUT = ("rank_stuck", "rank_silent", "node_lost")


def suspects(facts: Facts) -> str:
    """Faults of this machine that would explain it."""
    titles = []
    for check in _SUSPECTS:
        found = check(facts)
        judged = [found] if isinstance(found, Finding) else list(found or ())
        titles += [finding.title for finding in judged if finding.level in ("error", "warning")]
    return f"Likely here: {'; '.join(dict.fromkeys(titles))}." if titles else ""


def time_outs(facts: Facts) -> Finding | None:
    """Collectives that never ended: NCCL's time-outs, as they look from outside."""
    deaths = [code for code in (facts.serving.deaths if facts.serving else ()) if code in _TIMED_OUT]
    problem = facts.measured.problem if facts.measured else None
    timed_out = problem if problem and looks_like_timeout(problem) else None
    if not deaths and not timed_out:
        return None
    return Finding(
        "error",
        "nccl_timeout",
        "A collective did not end",
        timed_out or f"the engine died of {', '.join(deaths)}",
        "One rank did not come to an all-reduce the others wait in: it crashed, lost its link, runs other software, "
        "or the "
        f"machine was out of memory. {suspects(facts)}".strip(),
        "Look at the rank that is missing, not at those that wait: dmesg there (Xid, out of memory), then "
        "NCCL_DEBUG=INFO; "
        "the same driver, torch and NCCL everywhere; phalanx doctor --measure tests the link alone.",
    )


def deaths(facts: Facts) -> Iterator[Finding]:
    """Other ways in which an engine ended."""
    codes = dict.fromkeys(facts.serving.deaths if facts.serving else ())
    if "fabric" in codes:
        yield Finding(
            "error",
            "deaths",
            "Ranks did not have the same bits",
            "the engine died of fabric",
            "A rank computed something else from the same input: its memory, its link or its software is not the "
            "others'.",
            "phalanx doctor --measure compares sums rank by rank; look at ECC errors and at versions of every machine.",
        )
    others = [code for code in codes if code not in (*_TIMED_OUT, "fabric")]
    if others:
        yield Finding(
            "warning",
            "deaths",
            "The engine has died before",
            ", ".join(others),
            "",
            "Its log names the rank and the reason; signal 9 is most often the system's out-of-memory killer (dmesg).",
        )


def below_plan(facts: Facts) -> Finding | None:
    """What the server does against the planner's prediction for the same load."""
    serving, machine = facts.serving, machine_of(facts)
    if serving is None or machine is None or serving.concurrency < 1 or serving.tpot_ms is None:
        return None
    planned = _prediction(serving, machine)
    if planned is None:
        return None
    found = (
        f"{serving.tpot_ms:.1f} ms a token with {serving.concurrency:.0f} requests at once; planned "
        f"{planned.tpot.mid * 1e3:.1f} ({planned.tpot.low * 1e3:.1f} to {planned.tpot.high * 1e3:.1f})"
    )
    if serving.tpot_ms <= planned.tpot.high * 1e3:
        return Finding("ok", "below_plan", "Speed against the plan", found)
    return Finding(
        "warning",
        "below_plan",
        "The server is slower than planned",
        found,
        f"The plan is for cards and links in good health. {suspects(facts)}".strip(),
        "Mend the findings above first. Then look at phalanx:step_seconds in /metrics: a large share of all_reduce is "
        "the "
        "links, of schedule the processor; phalanx doctor --measure compares the cards with their data sheets.",
    )


def _prediction(serving: Serving, machine: Machine) -> Prediction | None:
    known = catalog.find(serving.model)
    if known is None or not 1 <= serving.tp <= len(machine):
        return None
    entry, number_format = known
    if not shape(entry.spec, serving.tp, ENGINES["phalanx"]).is_legal:
        return None
    workload = Workload(concurrency=max(1, round(serving.concurrency)))
    return predict(entry.spec, machine, serving.tp, "phalanx", workload, weights=number_format)
