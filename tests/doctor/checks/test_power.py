"""Heat, power and the circuit."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import power
from tests.doctor.build_machines import change, hgx, spark
from tests.doctor.checks.test_gpus import BARE, machine, said, with_first


@pytest.mark.parametrize(
    ("throttle", "titles"),
    [
        ((), ["Clocks"]),
        (("power-cap",), ["Clocks"]),
        (("sw-thermal",), ["Clocks are held down by heat"]),
        (("hw-thermal", "hw-slowdown"), ["Clocks are held down by heat"]),
        (("power-brake", "hw-slowdown"), ["The power supply brakes the cards"]),
        (("hw-slowdown",), ["Clocks are held down by the board"]),
        (("hw-thermal", "power-brake"), ["Clocks are held down by heat", "The power supply brakes the cards"]),
        (None, []),
    ],
)
def test_why_clocks_are_held_down(throttle: Any, titles: list[str]) -> None:
    assert [finding.title for finding in power.throttle(with_first(hgx(), throttle=throttle))] == titles


def test_hot_cards_are_told_before_they_slow_down() -> None:
    assert said(power.temperature(with_first(hgx(), temperature_c=86))) == [("warning", "temperature")]
    assert said(power.temperature(with_first(hgx(), temperature_c=86, throttle=("hw-thermal",)))) == []
    assert said(power.temperature(with_first(hgx(), temperature_c=None))) == []


def test_a_lowered_limit_warns_where_it_bites_or_differs() -> None:
    lowered = change(hgx(), gpus=tuple(change(gpu, power_limit_w=500.0) for gpu in hgx().gpus))
    assert said(power.power_limit(lowered)) == [("note", "power_limit")]
    capped = change(lowered, gpus=tuple(change(gpu, throttle=("power-cap",)) for gpu in lowered.gpus))
    assert said(power.power_limit(capped)) == [("warning", "power_limit")]
    assert said(power.power_limit(with_first(hgx(), power_limit_w=500.0))) == [("warning", "power_limit")]
    assert said(power.power_limit(hgx())) == [("ok", "power_limit")]
    assert said(power.power_limit(with_first(hgx(), power_limit_w=None))) == []


def test_the_circuit_carries_eight_boards_and_their_host() -> None:
    """8 x 0.7 kW of boards and half of that around them: a fifth of a board less, or half a board more.

    A three-phase PDU of 208 V and 30 A carries four fifths of 10.8 kW.
    """
    finding = power.power_supply(hgx())
    assert finding is not None
    assert finding.found == (
        "7.3 kW sustained, 8.4 kW at the boards' limits: a 208 V 30 A three-phase PDU carries it "
        "(8.6 kW continuous); supplies must ride out 11.2 kW for milliseconds."
    )


def test_no_circuit_for_unknown_cards_nor_for_a_spark() -> None:
    assert power.power_supply(machine(change(BARE, name="NVIDIA Z9000"))) is None
    assert power.power_supply(spark()) is None
