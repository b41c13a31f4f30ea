"""What a tensor-parallel group pays for its links, by the cost model."""

from __future__ import annotations

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.doctor.checks.products import product
from phalanx.doctor.facts import Facts
from phalanx.models import catalog
from phalanx.spec.machine import Gpu, Link
from phalanx.spec.model import ModelSpec

USUAL_MODEL = "Llama-3.3-70B"
_ROWS = 32
_MOST_RANKS = 8
_SLOWEST_PCIE = 25e9
_ACTIVATION_BYTES = 2


def step_toll(spec: ModelSpec, ranks: int, rows: int, link: Link) -> float:
    """Seconds that the all-reduces of one decode step of `rows` sequences take."""
    message = rows * spec.hidden * _ACTIVATION_BYTES
    return 2 * len(spec.layers) * all_reduce_seconds(message, ranks, link, "nccl")


def pcie_of(facts: Facts) -> Link:
    """The slowest card's way to the others when it has no NVLink."""
    known = [found.beyond.bandwidth for gpu in facts.gpus if (found := product(gpu))]
    return Link("pcie", min(known, default=_SLOWEST_PCIE))


def switch() -> Link:
    """What others are compared with: eight H100 on NVSwitch."""
    return Gpu.named("H100-SXM").link


def toll(facts: Facts) -> str:
    """What a usual model's decode step pays over PCIe here, and what it would pay over NVSwitch."""
    ranks = min(len(facts.gpus), _MOST_RANKS)
    return toll_of(facts, USUAL_MODEL, catalog.entries()[USUAL_MODEL].spec, ranks, _ROWS)


def toll_of(facts: Facts, model: str, spec: ModelSpec, ranks: int, rows: int) -> str:
    here, there = (step_toll(spec, ranks, rows, link) * 1e3 for link in (pcie_of(facts), switch()))
    return (
        f"All-reduces of a decode step of {model} at TP={ranks} with {rows} requests: about {here:.1f} ms over PCIe, "
        f"{there:.1f} ms over NVSwitch."
    )
