"""Costs and watts are arithmetic on dated prices."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.plan.price import Tariff, cost, power, usd_per_million
from phalanx.spec.machine import Gpu, Machine

H100 = Gpu.named("H100-SXM")


def test_rent_is_by_the_gpu_and_reserving_is_cheaper() -> None:
    found = cost(Machine.parse("4xH100-SXM"), Tariff())
    assert found.rent == pytest.approx((4 * 1.29, 4 * 3.25, 4 * 10.0))
    assert found.hourly == pytest.approx(13.0)
    assert found.reserved == pytest.approx(0.72 * 13.0)
    assert "2026-08-22" in found.dates[0]


def test_owning_by_hand() -> None:
    tariff = Tariff(usd_per_kwh=0.2, pue=1.5, years=5)
    found = cost(Machine.parse("8xH100-SXM"), tariff)
    purchase = 8 * 32_500 * 1.3
    kilowatts = 8 * 700 * (1.5 - 0.2) / 1000
    assert found.purchase == pytest.approx(purchase)
    assert found.owned == pytest.approx(purchase / (5 * 8760) + kilowatts * 1.5 * 0.2)
    assert found.break_even == pytest.approx(found.owned / 26.0)  # type: ignore[operator]


def test_a_whole_computer_brings_its_host() -> None:
    found = cost(Machine.parse("2xDGX-Spark"), Tariff())
    assert found.rent is None
    assert found.purchase == pytest.approx(3999 + 4699)
    assert found.hourly == found.owned
    assert found.basis == "owning"
    assert power(Machine.parse("2xDGX-Spark")).server_w == 480


def test_no_price_is_no_price() -> None:
    found = cost(Machine.parse("Gaudi3"), Tariff())
    assert (found.rent, found.owned, found.hourly, found.basis) == (None, None, None, "no price known")
    assert usd_per_million(found.hourly, 100) is None


def test_usd_per_million_tokens() -> None:
    assert usd_per_million(3.6, 1000) == pytest.approx(1.0)
    assert usd_per_million(3.6, 0) is None


def test_watts_of_boards_servers_and_facility_are_apart() -> None:
    """Four H100 are 2.8 kW of boards in a server of 3.5 to 5 kW."""
    found = power(Machine.parse("4xH100-SXM"))
    assert found.gpu_w == 2800
    assert found.server_w == pytest.approx(2800 * 1.5)
    assert 3500 < found.server_w < 5000
    assert found.gpu_sustained_w == pytest.approx(0.8 * 2800)
    assert found.server_sustained_w == pytest.approx(2800 * 1.3)
    assert found.server_transient_w == pytest.approx(2800 * 2.0)
    assert found.facility_w == pytest.approx(2800 * 1.5 * 1.3)
    assert found.volts * found.amperes == pytest.approx(found.server_w)
    assert (found.rack_units, found.cooling) == (4, "air with cold aisles, or liquid")
    assert power(Machine.parse("2x8xH100-SXM")).rack_units == 16


def test_break_even_in_hours_and_months_by_hand() -> None:
    found = cost(Machine.parse("4xH100-SXM"), Tariff())
    running = 2.8 * 1.3 * 1.3 * 0.12
    assert found.running == pytest.approx(running)
    assert found.break_even_hours == pytest.approx(24 * (169_000 / 35_040 + running) / 13.0)
    assert found.months_to_pay == pytest.approx(169_000 / (13.0 - running) / 730)
    monthly = found.monthly(peak_share=0.25, peak_hours=8)
    assert monthly["rent"] == pytest.approx(13.0 * 730)
    assert monthly["burst"] == pytest.approx(0.75 * monthly["owned"] + 0.25 / 3 * monthly["rent"])
    assert monthly["colocated"] == pytest.approx((169_000 / 35_040) * 730 + 2.8 * 1.3 * 150)
    dearer = cost(Machine.parse("4xH100-SXM"), Tariff(staff=7300, residency=730))
    assert dearer.owned == pytest.approx(found.owned + 11)  # type: ignore[operator]


def test_consumer_cards_have_a_price_to_buy() -> None:
    for name in ("RTX3090", "RTX4090", "RTX5090"):
        assert Gpu.named(name).price.buy, name


@pytest.mark.parametrize(
    ("machine", "circuit"),
    [
        ("1xRTX4090", "120 V 15 A"),
        ("2xRTX5090", "120 V 20 A"),
        ("4xH100-SXM", "208 V 30 A circuit"),
        ("8xH100-SXM", "208 V 30 A three-phase"),
        ("64xH100-SXM", "2 racks"),
    ],
)
def test_the_circuit_carries_the_limit(machine: str, circuit: str) -> None:
    assert circuit in power(Machine.parse(machine)).hint


@pytest.mark.parametrize("bad", [{"usd_per_kwh": -1.0}, {"pue": 0.9}, {"years": 0.0}])
def test_an_impossible_tariff_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="such as"):
        Tariff(**bad)
