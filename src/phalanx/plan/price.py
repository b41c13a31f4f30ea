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
HOST_POWER_SHARE = 0.5
"""What the rest of the server draws on top of its GPUs: four H100 are 2.8 kW in servers of 3.5 to 5 kW, eight are
5.6 kW in one of up to 10.2 kW (from memory of data sheets, 2026-11)."""
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


HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Tariff:
    """What owning depends on besides the machine. `pue` is cooling: facility power over machine power. A colocation
    takes `colocation` USD a month for a kW with its cooling (150: a rule of thumb from memory, 2026-11); `staff` and
    `residency` (data that must stay in a country) are USD a month on top of owning, 0 unless told.
    """

    usd_per_kwh: float = 0.12
    pue: float = 1.3
    years: float = 4.0
    colocation: float = 150.0
    staff: float = 0.0
    residency: float = 0.0

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

    `break_even` is the share of hours from which owning is cheaper than renting those hours on demand. `colocated`:
    owned, but housed, powered and cooled by others. `running`: what of owning is paid by the hour.
    """

    rent: tuple[float, float, float] | None
    reserved: float | None
    owned: float | None
    purchase: float | None
    break_even: float | None
    dates: tuple[str, ...]
    colocated: float | None = None
    running: float | None = None

    @property
    def break_even_hours(self) -> float | None:
        """Hours a day from which owning is cheaper; None where renting always is, or a price is missing."""
        return 24 * self.break_even if self.break_even is not None and self.break_even <= 1 else None

    @property
    def months_to_pay(self) -> float | None:
        """Months of use around the clock after which the rent would have bought it; None where it never does."""
        if self.rent is None or self.purchase is None or self.running is None or self.rent[1] <= self.running:
            return None
        return self.purchase / (self.rent[1] - self.running) / HOURS_PER_MONTH

    def monthly(self, peak_share: float = 0.5, peak_hours: float = 6.0) -> dict[str, float]:
        """USD a month of each way to have it around the clock. `burst`: own a base and rent the rest, `peak_share` of
        the whole, for `peak_hours` a day.
        """
        ways = {"rent": self.rent[1] if self.rent else None, "reserved": self.reserved}
        ways |= {"owned": self.owned, "colocated": self.colocated}
        if self.rent is not None and self.owned is not None:
            ways["burst"] = (1 - peak_share) * self.owned + peak_share * peak_hours / 24 * self.rent[1]
        return {way: hourly * HOURS_PER_MONTH for way, hourly in ways.items() if hourly is not None}

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
    purchase, owned, running = _owning(machine, tariff)
    housed = power(machine).server_sustained_w / 1000 * tariff.colocation / HOURS_PER_MONTH
    written_off = purchase / (tariff.years * HOURS_PER_YEAR) if purchase is not None else None
    people = (tariff.staff + tariff.residency) / HOURS_PER_MONTH
    return HourlyCost(
        rent=rent,
        reserved=rent[1] * RESERVED_SHARE if rent else None,
        owned=owned,
        purchase=purchase,
        break_even=owned / rent[1] if rent and owned is not None else None,
        dates=tuple(dict.fromkeys(f"{gpu.name}: {gpu.price.date or 'no price'}" for gpu in machine.gpus)),
        colocated=written_off + housed + people if written_off is not None else None,
        running=running,
    )


def _owning(machine: Machine, tariff: Tariff) -> tuple[float | None, float | None, float | None]:
    """Purchase of GPUs and host, an hour of it over its years with electricity, cooling and people, and these alone."""
    if all(gpu.price.buy for gpu in machine.gpus):
        cards = sum(sum(gpu.price.buy) / 2 for gpu in machine.gpus if gpu.price.buy)
        hosts = sum(0 if gpu.unified_memory else HOST_PRICE_SHARE for gpu in machine.gpus) / len(machine)
        purchase = cards * (1 + hosts)
        energy = power(machine).server_sustained_w / 1000 * tariff.pue * tariff.usd_per_kwh
        running = energy + (tariff.staff + tariff.residency) / HOURS_PER_MONTH
        return purchase, purchase / (tariff.years * HOURS_PER_YEAR) + running, running
    if all(gpu.price.own for gpu in machine.gpus):
        return None, sum(sum(gpu.price.own) / 2 for gpu in machine.gpus if gpu.price.own), None
    return None, None, None


def usd_per_million(hourly: float | None, tokens_per_second: float) -> float | None:
    """USD for a million output tokens at this speed, busy all the time."""
    if hourly is None or tokens_per_second <= 0:
        return None
    return hourly / (tokens_per_second * 3600) * 1e6


@dataclass(frozen=True)
class Power:
    """Watts of the boards, of the servers around them, and of the facility that cools them: at the limit, sustained,
    and for milliseconds.
    """

    gpu_w: float
    gpu_sustained_w: float
    server_w: float
    server_sustained_w: float
    server_transient_w: float
    facility_w: float
    volts: int
    amperes: float
    rack_units: int
    cooling: str
    hint: str


def power(machine: Machine, pue: float = 1.3) -> Power:
    """What the GPUs with their share of the host draw. A board that is a whole computer brings its host along."""
    boards = sum(gpu.power_w for gpu in machine.gpus)
    server = sum(gpu.power_w * (1 if gpu.unified_memory else 1 + HOST_POWER_SHARE) for gpu in machine.gpus)
    sustained = boards * SUSTAINED_SHARE
    transient = server + boards * (TRANSIENT_SHARE - 1)
    volts = 120 if server <= _CIRCUITS[1][0] else 208
    phases = 1.0 if server <= _CIRCUITS[3][0] else 3**0.5
    return Power(
        gpu_w=boards,
        gpu_sustained_w=sustained,
        server_w=server,
        server_sustained_w=server - boards + sustained,
        server_transient_w=transient,
        facility_w=server * pue,
        volts=volts,
        amperes=server / volts / phases,
        rack_units=_rack_units(machine),
        cooling=_cooling(machine),
        hint=_hint(server, transient),
    )


def _rack_units(machine: Machine) -> int:
    """Eight modules on a board take 8 U, four 4 U, as do up to eight cards; a computer for the desk takes none."""
    gpu, boxes = machine.gpus[0], machine.boxes
    if gpu.unified_memory:
        return 0
    in_a_box = machine.per_box or len(machine)
    return boxes * (8 if gpu.link.kind in ("nvswitch", "mesh") and in_a_box > 4 else 4) * -(-in_a_box // 8)


def _cooling(machine: Machine) -> str:
    hottest = max(gpu.power_w for gpu in machine.gpus)
    if machine.gpus[0].unified_memory:
        return "a desk"
    if hottest > 1000:
        return "liquid"
    return "air with cold aisles, or liquid" if hottest > 500 else "air"


def _hint(limit: float, transient: float) -> str:
    supply = f"supplies must ride out {transient / 1000:.1f} kW for milliseconds"
    for continuous, circuit in _CIRCUITS:
        if limit <= continuous:
            return f"{circuit} carries it ({continuous / 1000:.1f} kW continuous); {supply}"
    racks = -(-int(limit) // 34500)
    return f"{racks} racks of 34.5 kW each; {supply}"
