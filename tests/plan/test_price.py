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
    kilowatts = 8 * (1730 - 0.2 * 700) / 1000
    assert found.purchase == pytest.approx(purchase)
    assert found.owned == pytest.approx(purchase / (5 * 8760) + kilowatts * 1.5 * 0.2)
    assert found.break_even == pytest.approx(found.owned / 26.0)  # type: ignore[operator]


def test_a_whole_computer_brings_its_host() -> None:
    found = cost(Machine.parse("2xDGX-Spark"), Tariff())
    assert found.rent is None
    assert found.purchase == pytest.approx(3999 + 4699)
    assert found.hourly == found.owned
    assert found.basis == "owning"
    assert power(Machine.parse("2xDGX-Spark")).limit_w == 480


def test_no_price_is_no_price() -> None:
    found = cost(Machine.parse("Gaudi3"), Tariff())
    assert (found.rent, found.owned, found.hourly, found.basis) == (None, None, None, "no price known")
    assert usd_per_million(found.hourly, 100) is None


def test_usd_per_million_tokens() -> None:
    assert usd_per_million(3.6, 1000) == pytest.approx(1.0)
    assert usd_per_million(3.6, 0) is None


def test_watts_sustained_at_the_limit_and_for_milliseconds() -> None:
    found = power(Machine.parse("8xH100-SXM"))
    assert found.limit_w == 8 * 1730
    assert found.sustained_w == pytest.approx(8 * (1730 - 140))
    assert found.transient_w == pytest.approx(8 * (1730 + 350))


@pytest.mark.parametrize(
    ("machine", "circuit"),
    [
        ("1xRTX4090", "120 V 15 A"),
        ("2xRTX5090", "120 V 20 A"),
        ("4xH100-SXM", "208 V 30 A three-phase"),
        ("8xH100-SXM", "208 V 60 A three-phase"),
        ("64xH100-SXM", "4 racks"),
    ],
)
def test_the_circuit_carries_the_limit(machine: str, circuit: str) -> None:
    assert circuit in power(Machine.parse(machine)).hint


@pytest.mark.parametrize("bad", [{"usd_per_kwh": -1.0}, {"pue": 0.9}, {"years": 0.0}])
def test_an_impossible_tariff_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="such as"):
        Tariff(**bad)
