"""What a deployment costs and draws: rent, reserve or own, power, and the circuit it needs."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.spec.machine import Machine

HOURS_PER_YEAR = 8760
RESERVED_SHARE = 0.72
"""A year reserved against on demand: 2.35 USD/h (2026-03) against a median of 3.25 (2026-08) for an H100."""
HOST_PRICE_SHARE = 0.3
"""Chassis, processors, memory and network on top of the GPUs' purchase."""
HOST_POWER_SHARE = 0.35
"""What the rest of the server draws on top of its GPUs, where no all-in figure is known."""
SUSTAINED_SHARE = 0.8
"""Of a board's limit, what steady decoding draws; prompts draw all of it for moments."""
TRANSIENT_SHARE = 1.5
"""Milliseconds above the board's limit that supplies must ride out."""

_CIRCUITS = (
    (1440, "a 120 V 15 A outlet"),
    (1920, "a 120 V 20 A outlet"),
    (2944, "a 230 V 16 A outlet"),
    (4992, "a 208 V 30 A circuit"),
    (8646, "a 208 V 30 A three-phase PDU"),
    (17293, "a 208 V 60 A three-phase PDU"),
    (34500, "two 415 V 30 A three-phase PDUs"),
)
"""Continuous load in W (four fifths of the breaker) that each kind of circuit carries."""


@dataclass(frozen=True)
class Tariff:
    """What owning depends on besides the machine. `pue` is cooling: facility power over machine power."""

    usd_per_kwh: float = 0.12
    pue: float = 1.3
    years: float = 4.0

    def __post_init__(self) -> None:
        if self.usd_per_kwh < 0 or self.pue < 1 or self.years <= 0:
            raise ConfigError(
                "bad_tariff",
                f"Electricity {self.usd_per_kwh} USD/kWh, PUE {self.pue}, {self.years} years.",
                "Electricity is at least 0, PUE at least 1, years above 0; such as 0.12, 1.3 and 4.",
            )


@dataclass(frozen=True)
class HourlyCost:
    """USD an hour for the GPUs in use: on demand (low, median, high), reserved and owned. None: no price is known.

    `break_even` is the share of hours from which owning is cheaper than renting those hours on demand.
    """

    rent: tuple[float, float, float] | None
    reserved: float | None
    owned: float | None
    purchase: float | None
    break_even: float | None
    dates: tuple[str, ...]

    @property
    def hourly(self) -> float | None:
        """The figure used for ranking: median rent, or owning where nobody rents it out."""
        return self.rent[1] if self.rent else self.owned

    @property
    def basis(self) -> str:
        return "rent, median of clouds" if self.rent else "owning" if self.owned is not None else "no price known"


def cost(machine: Machine, tariff: Tariff) -> HourlyCost:
    """The price of running all GPUs of this machine for an hour."""
    rents = [gpu.price.rent for gpu in machine.gpus]
    rent = None
    if all(each is not None for each in rents):
        low, median, high = (sum(column) for column in zip(*(each for each in rents if each), strict=True))
        rent = (low, median, high)
    purchase, owned = _owning(machine, tariff)
    return HourlyCost(
        rent=rent,
        reserved=rent[1] * RESERVED_SHARE if rent else None,
        owned=owned,
        purchase=purchase,
        break_even=owned / rent[1] if rent and owned is not None else None,
        dates=tuple(dict.fromkeys(f"{gpu.name}: {gpu.price.date or 'no price'}" for gpu in machine.gpus)),
    )


def _owning(machine: Machine, tariff: Tariff) -> tuple[float | None, float | None]:
    """Purchase of GPUs and host, and an hour of it over its years with electricity and cooling."""
    if all(gpu.price.buy for gpu in machine.gpus):
        cards = sum(sum(gpu.price.buy) / 2 for gpu in machine.gpus if gpu.price.buy)
        hosts = sum(0 if gpu.unified_memory else HOST_PRICE_SHARE for gpu in machine.gpus) / len(machine)
        purchase = cards * (1 + hosts)
        energy = power(machine).sustained_w / 1000 * tariff.pue * tariff.usd_per_kwh
        return purchase, purchase / (tariff.years * HOURS_PER_YEAR) + energy
    if all(gpu.price.own for gpu in machine.gpus):
        return None, sum(sum(gpu.price.own) / 2 for gpu in machine.gpus if gpu.price.own)
    return None, None


def usd_per_million(hourly: float | None, tokens_per_second: float) -> float | None:
    """USD for a million output tokens at this speed, busy all the time."""
    if hourly is None or tokens_per_second <= 0:
        return None
    return hourly / (tokens_per_second * 3600) * 1e6


@dataclass(frozen=True)
class Power:
    """Watts of the whole machine: while it serves, at its boards' limits, and for milliseconds."""

    sustained_w: float
    limit_w: float
    transient_w: float
    hint: str


def power(machine: Machine) -> Power:
    """What the GPUs with their share of the host draw. A board that is a whole computer brings its host along."""
    boards = sum(gpu.power_w for gpu in machine.gpus)
    limit = sum(
        gpu.power_w if gpu.unified_memory else gpu.all_in_power_w or gpu.power_w * (1 + HOST_POWER_SHARE)
        for gpu in machine.gpus
    )
    sustained = limit - boards * (1 - SUSTAINED_SHARE)
    transient = limit + boards * (TRANSIENT_SHARE - 1)
    return Power(sustained, limit, transient, _hint(limit, transient))


def _hint(limit: float, transient: float) -> str:
    supply = f"supplies must ride out {transient / 1000:.1f} kW for milliseconds"
    for continuous, circuit in _CIRCUITS:
        if limit <= continuous:
            return f"{circuit} carries it ({continuous / 1000:.1f} kW continuous); {supply}"
    racks = -(-int(limit) // 34500)
    return f"{racks} racks of 34.5 kW each; {supply}"
