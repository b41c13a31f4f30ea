"""Heat and power: what slows a card down, and what its circuit must carry."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.checks.products import machine_of, whose
from phalanx.doctor.facts import Facts, GpuFacts, Throttle
from phalanx.doctor.finding import Finding
from phalanx.plan.price import power

_HOT_C = 85
"""Data-center and GeForce cards begin to slow down between 83 and 92 C."""
_LIMIT_SHARE = 0.98
_HEAT: tuple[Throttle, ...] = ("sw-thermal", "hw-thermal")


def throttle(facts: Facts) -> Iterator[Finding]:
    """Clocks held down by heat, by the power supply, or by both."""
    by_heat = _held_by(facts, *_HEAT)
    by_supply = _held_by(facts, "power-brake")
    by_board = [gpu for gpu in _held_by(facts, "hw-slowdown") if gpu not in by_heat and gpu not in by_supply]
    if by_heat:
        heat = ", ".join(f"{gpu.temperature_c} C" for gpu in by_heat if gpu.temperature_c is not None)
        yield Finding(
            "warning",
            "throttle",
            "Clocks are held down by heat",
            f"{whose(by_heat)}{f': {heat}' if heat else ''}",
            "All ranks wait for the slowest card: one hot card slows the whole group.",
            "Check fans, air flow, dust, blanking panels and inlet temperature (liquid: flow); until then lower the "
            "power "
            "limit (nvidia-smi -pl), which costs less than throttling.",
        )
    if by_supply:
        yield Finding(
            "warning",
            "throttle",
            "The power supply brakes the cards",
            f"{whose(by_supply)}: power brake asserted. {_circuit(facts)}".strip(),
            "Prefill steps of all ranks start together and draw far above the boards' limit for milliseconds; a "
            "supply that "
            "cannot ride that out halves the clocks, or trips.",
            "Check that every supply is plugged in and on its own circuit; lower the limit of all cards alike "
            "(nvidia-smi -pl), which bounds the transients too.",
        )
    if by_board:
        yield Finding(
            "warning",
            "throttle",
            "Clocks are held down by the board",
            f"{whose(by_board)}: hardware slowdown",
            "Heat, an external power brake or a fast trigger of the supply cut the clocks to half or less.",
            "Check cooling and supplies; nvidia-smi -q -d PERFORMANCE names the trigger.",
        )
    if facts.gpus and all(gpu.throttle is not None for gpu in facts.gpus) and not (by_heat or by_supply or by_board):
        yield Finding("ok", "throttle", "Clocks", "not held down")


def _held_by(facts: Facts, *reasons: Throttle) -> list[GpuFacts]:
    return [gpu for gpu in facts.gpus if any(reason in reasons for reason in gpu.throttle or ())]


def _circuit(facts: Facts) -> str:
    """PDU arithmetic, where all cards are known."""
    machine = machine_of(facts)
    if machine is None:
        return ""
    draw = power(machine)
    return (
        f"{draw.server_sustained_w / 1000:.1f} kW sustained, {draw.server_w / 1000:.1f} kW at the boards' limits: "
        f"{draw.hint}."
    )


def temperature(facts: Facts) -> Finding | None:
    """Hot, though not yet slowed."""
    hot = [gpu for gpu in facts.gpus if (gpu.temperature_c or 0) >= _HOT_C and not _is_slowed(gpu)]
    if not hot:
        return None
    return Finding(
        "warning",
        "temperature",
        "Cards are close to throttling",
        ", ".join(f"GPU {gpu.index}: {gpu.temperature_c} C" for gpu in hot),
        "A few degrees more and the clocks fall.",
        "Check cooling before a long run.",
    )


def _is_slowed(gpu: GpuFacts) -> bool:
    return any(reason in _HEAT for reason in gpu.throttle or ())


def power_limit(facts: Facts) -> Finding | None:
    """A limit below the card's own."""
    told = [gpu for gpu in facts.gpus if gpu.power_limit_w and gpu.power_default_w]
    low = [gpu for gpu in told if (gpu.power_limit_w or 0) < _LIMIT_SHARE * (gpu.power_default_w or 0)]
    if low:
        capped = _held_by(facts, "power-cap")
        limits = ", ".join(f"GPU {gpu.index}: {gpu.power_limit_w:.0f} of {gpu.power_default_w:.0f} W" for gpu in low)
        return Finding(
            "warning" if any(gpu in capped for gpu in low) or len(low) < len(facts.gpus) else "note",
            "power_limit",
            "The power limit is lowered",
            limits,
            "Prefill slows down with it; decode, which waits for memory, hardly. Unlike limits make all ranks wait "
            "for the "
            "lowest.",
            f"If that is not meant: nvidia-smi -pl {low[0].power_default_w:.0f}",
        )
    if told and len(told) == len(facts.gpus):
        return Finding("ok", "power_limit", "Power limit", f"{told[0].power_limit_w:.0f} W, the card's own")
    return None


def power_supply(facts: Facts) -> Finding | None:
    """What the circuit behind this machine must carry. A DGX Spark comes with its supply."""
    circuit = _circuit(facts)
    if not circuit or all(gpu.unified for gpu in facts.gpus):
        return None
    return Finding("note", "power_supply", "Power to provide", circuit)
