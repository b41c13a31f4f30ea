"""How many connections there may be, and which go first."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

from phalanx.server.door import Door
from phalanx.server.turnstile import Turnstile


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
