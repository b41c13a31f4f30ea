"""How many connections there may be, and which go first."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from itertools import pairwise

from phalanx.server.door import Door, origin
from phalanx.server.turnstile import MOST_AT_ONCE, Turnstile
from tests import timeless


class Guest:
    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.out = False

    def turn_out(self) -> None:
        self.out = True


def enter(door: Door, count: int, address: str = "a") -> list[Guest]:
    guests = [Guest(address) for _ in range(count)]
    for guest in guests:
        assert door.enter(guest)
    return guests


def test_beyond_the_bound_the_one_idle_for_longest_goes() -> None:
    door = Door(8)
    first, second, *_ = enter(door, 4, "a") + enter(door, 4, "b")
    door.work(first)
    enter(door, 1, "c")
    assert (first.out, second.out) == (False, True)
    door.rest(first)
    others = enter(door, 6, "c")
    assert not first.out
    assert sum(guest.out for guest in others) == 0


def test_one_address_has_three_quarters_and_its_own_go_first() -> None:
    door = Door(8)
    (other,) = enter(door, 1, "b")
    crowd = enter(door, 50, "a")
    assert not other.out
    assert sum(not guest.out for guest in crowd) == 6
    assert not any(guest.out for guest in crowd[-6:])
    enter(door, 1, "b")
    assert not other.out


def test_where_all_are_at_work_a_newcomer_has_no_place_and_takes_none() -> None:
    door = Door(4)
    workers = [*enter(door, 2, "a"), *enter(door, 2, "b")]
    for worker in workers:
        door.work(worker)
    late = Guest("c")
    assert not door.enter(late)
    assert not any(worker.out for worker in workers)
    door.leave(late)
    door.leave(workers[0])
    assert door.enter(Guest("c"))


def test_what_has_left_is_forgotten() -> None:
    door = Door(8)
    for index in range(100):
        (guest,) = enter(door, 1, str(index))
        door.work(guest)
        door.leave(guest)
    assert not door._inside
    assert not door._idle
    assert not door._idle_of


def test_there_is_room_for_no_more_than_there_are_file_descriptors() -> None:
    script = "from phalanx.server.door import room_for_connections; print(room_for_connections())"
    for files, room in ((256, 128), (100, 16), (100_000, 4096)):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(files, hard)

        def limit(files: int = files) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 64), files))

        done = subprocess.run(
            [sys.executable, "-c", script], preexec_fn=limit, capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == min(room, max(16, files - 128))


def test_so_many_begin_in_one_turn_of_the_loop_and_in_the_order_they_came() -> None:
    async def crowd() -> list[list[int]]:
        turnstile, turns = Turnstile(3), [[]]

        async def one(number: int) -> None:
            await turnstile.pass_through()
            turns[-1].append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(8)]
        tasks[4].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns.append([])
        return [turn for turn in turns if turn]

    turns = asyncio.run(crowd())
    assert [number for turn in turns for number in turn] == [0, 1, 2, 3, 5, 6, 7]
    assert max(map(len, turns)) == 3


def test_the_lines_of_all_addresses_take_turns() -> None:
    async def crowd() -> list[str]:
        turnstile, order = Turnstile(2), list[str]()
        for number in range(20):
            turnstile.soon(lambda number=number: order.append(f"crowd {number}"), "crowd")  # type: ignore[misc]
        for number in range(2):
            turnstile.soon(lambda number=number: order.append(f"guest {number}"), "guest")  # type: ignore[misc]
        while len(order) < 22:
            await asyncio.sleep(0)
        return order

    order = asyncio.run(crowd())
    assert order[:6] == ["crowd 0", "crowd 1", "crowd 2", "guest 0", "crowd 3", "guest 1"]
    assert [each for each in order if each.startswith("crowd")] == [f"crowd {number}" for number in range(20)]


def test_one_that_fails_at_its_turn_keeps_nobody_from_theirs() -> None:
    async def crowd() -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turnstile, last = Turnstile(1), asyncio.Event()
        turnstile.soon(lambda: None)
        turnstile.soon(lambda: 1 // 0)
        turnstile.soon(last.set)
        await last.wait()
        return True

    assert timeless.run(crowd())


def test_of_many_that_are_late_in_one_moment_few_are_told_in_a_turn() -> None:
    async def crowd() -> tuple[list[int], list[bool]]:
        turnstile, late, told = Turnstile(), 0, [0]

        async def one(seconds: float) -> bool:
            nonlocal late
            try:
                async with turnstile.limit(5.0):
                    await asyncio.sleep(seconds)
            except TimeoutError:
                late += 1
                return True
            return False

        tasks = [asyncio.create_task(one(4.0 if number % 4 else 6.0)) for number in range(800)]
        await asyncio.sleep(5.0)
        for _ in range(50):
            told.append(late)
            await asyncio.sleep(0)
        return told, await asyncio.gather(*tasks)

    told, late = timeless.run(crowd())
    assert late == [not number % 4 for number in range(800)]
    assert max(after - before for before, after in pairwise(told)) <= 2 * MOST_AT_ONCE


def test_who_is_done_before_being_told_was_not_late() -> None:
    async def scene() -> bool:
        loop, turnstile, wrong = asyncio.get_running_loop(), Turnstile(1), list[object]()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        done: asyncio.Future[bool] = loop.create_future()
        for _ in range(5):
            loop.call_at(1.0, turnstile.soon, lambda: None)
        loop.call_at(1.0, done.set_result, True)
        async with turnstile.limit(1.0):
            await done
        for _ in range(10):
            await asyncio.sleep(0)
        return done.result() and not wrong

    assert timeless.run(scene())


def test_of_ipv6_a_network_counts_as_one_address() -> None:
    assert origin("2001:db8:1:2:aaaa::1") == origin("2001:db8:1:2:bbbb::9") != origin("2001:db8:1:3::1")
    assert origin("fe80::1%eth0") == origin("fe80::2")
    assert origin("192.0.2.1") == "192.0.2.1" != origin("192.0.2.2")
