"""Which TP degree, how many replicas, which format and engine: everything that fits, ranked under the SLO."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import ConfigError
from phalanx.plan.candidates import ANY_SPEED, Candidate, Excluded, Plan
from phalanx.plan.disaggregated import parted
from phalanx.plan.engines import ENGINES, EngineTraits
from phalanx.plan.price import Tariff
from phalanx.plan.rates import hold, order
from phalanx.plan.search import Loaded, Search
from phalanx.plan.shapes import MOST_RANKS
from phalanx.plan.slo import Slo
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

USUAL_TARIFF = Tariff()


def choose(
    spec: ModelSpec,
    model: str,
    machine: Machine,
    workload: Workload,
    *,
    slo: Slo = ANY_SPEED,
    engines: Sequence[EngineTraits] = tuple(ENGINES.values()),
    formats: Sequence[str] = (),
    kv_format: str = "bf16",
    tps: Sequence[int] = (),
    tariff: Tariff = USUAL_TARIFF,
    context: int | None = None,
) -> Plan:
    """Everything that loads and fits, ranked: what meets the SLO first, then by tokens a second and GPU.

    `context`: the longest request that must be served, where that is longer than those of the workload.
    """
    longest = max(context or 0, workload.longest)
    if longest > spec.max_positions:
        raise ConfigError(
            "context_too_long",
            f"Requests reach {longest:,} tokens; {model} was made for {spec.max_positions:,}.",
            f"Ask for at most {spec.max_positions:,}, or for a model with a longer context.",
        )
    search = Search(spec, machine, workload, kv_format, tariff, longest)
    degrees = tps or [
        tp
        for tp in range(1, min(len(machine), MOST_RANKS) + 1)
        if tp <= (machine.per_box or tp) or tp % machine.per_box == 0
    ]

    def consider(formats: Sequence[str]) -> list[Candidate | Excluded]:
        if workload.is_endless:
            return hold(search, formats, engines, degrees, slo)
        found = list(search.load_all(formats, engines, degrees))
        loaded = [each for each in found if isinstance(each, Loaded)]
        alone = [search.deploy(each) if isinstance(each, Loaded) else each for each in found]
        return [*alone, *parted(search, loaded, slo)]

    outcomes = consider(formats or default_formats(spec))
    if not formats and _small_could_win(spec, machine, outcomes, slo):
        outcomes += consider(four_bit_formats(machine))
    candidates = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
    excluded = tuple(outcome for outcome in outcomes if isinstance(outcome, Excluded))
    candidates.sort(key=lambda candidate: order(candidate, slo))
    return Plan(spec, model, machine, workload, slo, tariff, tuple(candidates), excluded, longest, context is not None)


def default_formats(spec: ModelSpec) -> tuple[str, ...]:
    """The checkpoint's own format, and FP8 where that is still to be had."""
    return (spec.number_format, "fp8") if spec.quantization is None else (spec.number_format,)


def four_bit_formats(machine: Machine) -> tuple[str, ...]:
    """NVFP4 where the cards multiply it, AWQ elsewhere."""
    return ("nvfp4",) if all("fp4" in gpu.peaks for gpu in machine.gpus) else ("awq",)


def _small_could_win(spec: ModelSpec, machine: Machine, outcomes: Sequence[Candidate | Excluded], slo: Slo) -> bool:
    """Four bits are tried where nothing else fits or meets the SLO, where cards have no FP8, or multiply four bits."""
    if spec.quantization is not None:
        return False
    enough = any(isinstance(each, Candidate) and each.is_held and slo.excess(each.prediction) <= 1 for each in outcomes)
    peaks = machine.smallest.peaks
    return not enough or "fp8" not in peaks or "fp4" in peaks
