"""What is scarce is shared between keys, and who waits has a turn."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.server.fairness import Shares, Turns
from tests import timeless


def taken(shares: Shares, key: str) -> int:
    """How many units the key gets, one by one."""
    count = 0
    while shares.take(key, 1):
        count += 1
    return count


def test_one_key_alone_may_have_everything() -> None:
    shares = Shares(8, shared=False)
    assert taken(shares, "") == 8
    shares.give("", 3)
    assert shares.free == 3
    assert taken(shares, "") == 3


def test_of_several_keys_none_has_all_and_a_newcomer_finds_room() -> None:
    shares = Shares(320, shared=True)
    assert taken(shares, "greedy") == 240
    assert taken(shares, "second") == 60
    assert taken(shares, "third") == 15
    shares.give("greedy", 240)
    assert taken(shares, "second") > 100


def test_not_even_the_first_request_of_a_key_takes_all_and_the_last_unit_is_a_newcomers() -> None:
    shares = Shares(10, shared=True)
    assert not shares.take("one", 9)
    assert shares.take("one", 7)
    assert shares.take("two", 2)
    assert not shares.take("two", 1)
    assert shares.take("three", 1)
    assert not shares.take("four", 1)


def test_a_key_that_gave_everything_back_leaves_nothing_behind() -> None:
    shares = Shares(10, shared=True)
    for index in range(1000):
        assert shares.take(str(index), 1)
        shares.give(str(index), 1)
    assert not shares._held


async def in_turn(turns: Turns, order: list[str], key: str, name: str) -> None:
    async with turns.turn(key):
        order.append(name)
        await asyncio.sleep(1)


def test_keys_take_turns_however_many_wait_for_one_of_them() -> None:
    async def scene() -> list[str]:
        turns, order = Turns(), []
        crowd = [asyncio.create_task(in_turn(turns, order, "greedy", f"greedy {index}")) for index in range(100)]
        await asyncio.sleep(0.5)
        await asyncio.create_task(in_turn(turns, order, "honest", "honest"))
        for task in crowd:
            task.cancel()
        return order

    assert timeless.run(scene())[:3] == ["greedy 0", "greedy 1", "honest"]


@pytest.mark.parametrize("when", [0.5, 1.0])
def test_who_gives_up_gives_its_place_to_the_next(when: float) -> None:
    """While it waits, and in the moment in which it is let in."""

    async def scene() -> list[str]:
        turns, order = Turns(), []
        tasks = [asyncio.create_task(in_turn(turns, order, key, key)) for key in "abc"]
        await asyncio.sleep(when)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await in_turn(turns, order, "d", "d")
        assert not turns._waiting
        return order

    order = timeless.run(scene())
    assert [name for name in order if name != "b"] == ["a", "c", "d"]


def test_as_many_are_in_at_once_as_there_are_places() -> None:
    async def scene() -> float:
        turns, order = Turns(3), []
        await asyncio.gather(*(in_turn(turns, order, "", "") for _ in range(9)))
        return asyncio.get_running_loop().time()

    assert timeless.run(scene()) == pytest.approx(3.0)
