"""Machines side by side: what each holds, how fast it is, what it costs, and what it is good for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from phalanx.models import catalog
from phalanx.plan.candidates import Plan
from phalanx.plan.engines import ENGINES, GIB
from phalanx.plan.survey import survey
from phalanx.plan.tables import plain_table
from phalanx.spec.machine import Machine

_OFTEN = 0.25
"""Of a decode step, from which all-reduces are what holds a machine back."""


@dataclass(frozen=True)
class Compared:
    """One machine of a comparison. `kept`: GiB by what keeps them: the way from all memory to what models can use."""

    plan: Plan
    total_gib: float
    kept: dict[str, float]

    @property
    def effective_gib(self) -> float:
        return self.total_gib - sum(self.kept.values())


def compared(plan: Plan) -> Compared:
    """The memory of the whole machine as the best candidate's engine uses it; where nothing fits, all of it."""
    machine, best = plan.machine, plan.best
    total = sum(gpu.memory_bytes for gpu in machine.gpus) / GIB
    kept: dict[str, float] = {}
    if best is not None:
        copies = len(machine) / len(best.fit.ranks)
        for rank in best.fit.ranks:
            for line in rank.lines[1:]:
                if not line.what.startswith("weights"):
                    kept[line.what] = kept.get(line.what, 0.0) - line.bytes / GIB * copies
    return Compared(plan, total, kept)


def readiness(machine: Machine) -> str:
    """What a data center asks of a card: corrected memory, links, partitions, whose warranty."""
    gpu = machine.gpus[0]
    links = {"nvswitch": "NVSwitch", "nvlink-bridge": "NVLink in pairs", "mesh": "a mesh of links"}
    return ", ".join(
        (
            "ECC" if all(each.ecc for each in machine.gpus) else "no ECC",
            links.get(gpu.link.kind, "no NVLink"),
            "MIG" if gpu.mig else "no MIG",
            f"{gpu.grade} warranty",
        )
    )


def good_and_bad(plan: Plan) -> str:
    """In a line, by what its numbers say."""
    best, machine = plan.best, plan.machine
    if best is None:
        return "too small for this model"
    gpu = machine.smallest
    step = best.prediction.step
    good = []
    if best.fit.max_sequences * best.replicas >= 4 * plan.workload.concurrency:
        good.append("room for more at once")
    if "fp4" in gpu.peaks:
        good.append("multiplies four bits")
    bad = []
    if step.all_reduce > _OFTEN * step.total:
        bad.append(f"all-reduces take {step.all_reduce / step.total:.0%} of a step")
    if "fp8" not in gpu.peaks:
        bad.append("no FP8")
    if gpu.bandwidth < 1e12:
        bad.append("slow memory")
    if gpu.grade == "consumer":
        bad.append("warranty may not cover a data center")
    return f"good: {', '.join(good) or 'what the numbers say'}; bad: {', '.join(bad) or 'nothing that shows here'}"


def record(each: Compared) -> dict[str, Any]:
    """For programs."""
    plan, best = each.plan, each.plan.best
    power = plan.power
    return {
        "machine": plan.machine.name,
        "memory_gib": each.total_gib,
        "kept_gib": each.kept,
        "effective_gib": each.effective_gib,
        "formats": sorted({candidate.weight_format for candidate in plan.candidates}),
        "best": best.label if best else None,
        "tokens_per_s": best.throughput if best else None,
        "ttft_ms": best.prediction.ttft.mid * 1e3 if best else None,
        "tpot_ms": best.prediction.tpot.mid * 1e3 if best else None,
        "usd_per_million_tokens": best.usd_per_million if best else None,
        "usd_per_hour": best.cost.hourly if best else None,
        "purchase_usd": best.cost.purchase if best else None,
        "power_w": power.server_w if power else None,
        "meets_slo": bool(plan.feasible),
        "readiness": readiness(plan.machine),
        "good_and_bad": good_and_bad(plan),
    }


def show_comparison(plans: list[Plan], console: Console) -> None:
    """Machines as columns, in the order they were asked for."""
    rows = [record(compared(plan)) for plan in plans]
    table = plain_table("", *(str(row["machine"]) for row in rows))
    for title, name, form in _LINES:
        table.add_row(title, *("-" if row[name] is None else form(row[name]) for row in rows))
    console.print(table)
    for row in rows:
        kept = " ".join(f"- {gib:.0f} {what}" for what, gib in row["kept_gib"].items())
        console.print(
            f"{row['machine']}: {row['memory_gib']:.0f} GiB {kept} = {row['effective_gib']:.0f} GiB for weights and KV"
        )
        console.print(f"  {row['good_and_bad']}; {row['readiness']}")


_LINES: tuple[tuple[str, str, Any], ...] = (
    ("memory GiB", "memory_gib", "{:,.0f}".format),
    ("usable GiB", "effective_gib", "{:,.0f}".format),
    ("fits as", "formats", ", ".join),
    ("best", "best", str),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("TTFT ms", "ttft_ms", "{:,.0f}".format),
    ("TPOT ms", "tpot_ms", "{:,.1f}".format),
    ("$/M tokens", "usd_per_million_tokens", "{:,.2f}".format),
    ("$/h", "usd_per_hour", "{:,.2f}".format),
    ("to buy $", "purchase_usd", "{:,.0f}".format),
    ("power W", "power_w", "{:,.0f}".format),
)


def what_fits(machine: Machine, context: int, kv_format: str = "bf16") -> list[dict[str, Any]]:
    """Every model of the catalog that this machine holds, in the first format that fits, and how fast an answer can be:
    bytes that a token reads over the bandwidth, the data sheet's limit.
    """
    found = []
    for told in survey(machine, ENGINES["vllm"], kv_format, context):
        if told["ways"]:
            way = told["ways"][0]
            found.append(
                {
                    "model": told["model"],
                    "parameters": told["parameters"],
                    "format": way["format"],
                    "tp": way["tp"],
                    "longest_context": way["longest_context"],
                    "max_tokens_per_s_per_user": way["max_tokens_per_s_per_user"],
                }
            )
    return sorted(found, key=lambda each: -each["parameters"])


def show_what_fits(machine: Machine, found: list[dict[str, Any]], console: Console) -> None:
    console.print(f"{machine.name} holds {len(found)} of {len(catalog.entries())} models of the catalog (vLLM):")
    table = plain_table("model", "B", "format", "TP", "longest context", "tok/s a user, at most")
    for each in found:
        table.add_row(
            each["model"],
            f"{each['parameters'] / 1e9:,.1f}",
            each["format"],
            str(each["tp"]),
            f"{each['longest_context']:,}",
            f"{each['max_tokens_per_s_per_user']:,.0f}",
        )
    console.print(table)
