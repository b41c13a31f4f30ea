"""Who may use the engine where several keys share it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.runtime.config import EngineConfig
from phalanx.server.engine_client import EngineLaunch
from phalanx.server.errors import ApiError
from phalanx.server.pace import Pace
from phalanx.server.places import Places, RequestPlace
from tests import timeless

STARTED = SimpleNamespace(max_num_seqs=64, max_model_len=8192)


class Supervisor:
    """Of an engine for 64 sequences, with 256 more places to wait."""

    room = 320

    def __init__(self) -> None:
        self.client: Any = SimpleNamespace(started=STARTED, pace=Pace())
        self.launch = EngineLaunch(EngineConfig(max_num_batched_tokens=2048), 10, "none")
        self.stopped = False

    def admit(self, choices: int) -> Any:
        if self.stopped:
            raise ApiError(503, "The server is draining.", "server_draining")
        return self.client


def places(shared: bool = True) -> Places:
    supervisor: Any = Supervisor()
    return Places(supervisor, shared)


async def crowd(
    into: Places, key: str, count: int, choices: int = 1, tokens: int = 10
) -> list[asyncio.Task[RequestPlace]]:
    tasks = [asyncio.create_task(into.enter(key, choices, tokens)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def inside(tasks: list[asyncio.Task[RequestPlace]]) -> list[RequestPlace]:
    return [task.result() for task in tasks if task.done() and task.exception() is None]


def refused(tasks: list[asyncio.Task[RequestPlace]]) -> int:
    return sum(task.done() and isinstance(task.exception(), ApiError) for task in tasks)


async def end(*groups: list[asyncio.Task[RequestPlace]]) -> None:
    tasks = [task for group in groups for task in group]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_one_request_never_fills_the_batch_that_others_share() -> None:
    async def scene() -> None:
        shared = places()
        assert refused(await crowd(shared, "greedy", 1, choices=64)) == 1
        large = await crowd(shared, "greedy", 1, choices=48)
        assert len(inside(large)) == 1
        honest = await crowd(shared, "honest", 1)
        assert len(inside(honest)) == 1
        assert len(inside(await crowd(places(shared=False), "", 1, choices=64))) == 1
        await end(large, honest)

    timeless.run(scene())


def test_with_one_key_all_that_is_admitted_goes_through() -> None:
    async def scene() -> None:
        assert len(inside(await crowd(places(shared=False), "", 320, tokens=8192))) == 320

    timeless.run(scene())


def test_a_key_has_neither_all_places_nor_the_whole_batch() -> None:
    async def scene() -> None:
        house = places()
        greedy = await crowd(house, "greedy", 400)
        assert len(inside(greedy)) == 48
        assert refused(greedy) == 160
        honest = await crowd(house, "honest", 4)
        assert len(inside(honest)) == 4
        await end(greedy, honest)

    timeless.run(scene())


def test_long_prompts_of_one_key_are_let_in_as_they_are_read() -> None:
    """So another's prompt stands behind one of them, not behind all."""

    async def scene() -> None:
        house = places()
        greedy = await crowd(house, "greedy", 20, tokens=8000)
        assert len(inside(greedy)) == 1
        honest = await crowd(house, "honest", 1, tokens=50)
        assert len(inside(honest)) == 1
        house.prefilled(inside(greedy)[0])
        await asyncio.sleep(0)
        assert len(inside(greedy)) == 2
        await end(greedy, honest)

    timeless.run(scene())


def test_keys_that_wait_are_let_in_one_after_the_other() -> None:
    async def scene() -> None:
        house = places()
        first = inside(await crowd(house, "first", 1, choices=48))
        rest = await crowd(house, "rest", 1, choices=16)
        many, few = await crowd(house, "many", 50), await crowd(house, "few", 2)
        assert (len(inside(many)), len(inside(few))) == (0, 0)
        house.leave(first[0])
        await asyncio.sleep(0)
        assert (len(inside(many)) > 20, len(inside(few))) == (True, 2)
        await end(rest, many, few)

    timeless.run(scene())


@pytest.mark.parametrize("choices", [1, 48])
def test_who_leaves_or_gives_up_leaves_nothing_behind(choices: int) -> None:
    async def scene() -> None:
        house = places()
        tasks = [*await crowd(house, "a", 90, choices), *await crowd(house, "b", 90, choices, tokens=100_000)]
        for task in tasks[::2]:
            task.cancel()
        for _ in range(200):
            await asyncio.sleep(0)
            for task in [task for task in tasks if task.done() and not task.cancelled() and task.exception() is None]:
                house.leave(task.result())
                tasks.remove(task)
        await end(tasks)
        assert not house._waiting
        for shares in (house._queue, house._sequences, house._prompts):
            assert not shares._held

    timeless.run(scene())


def test_who_waits_while_the_server_stops_hears_of_it() -> None:
    async def scene() -> None:
        supervisor: Any = Supervisor()
        house = Places(supervisor, shared=True)
        full = inside([*await crowd(house, "first", 1, choices=48), *await crowd(house, "second", 1, choices=16)])
        late = await crowd(house, "third", 1)
        supervisor.stopped = True
        for place in full:
            house.leave(place)
        await asyncio.gather(*late, return_exceptions=True)
        assert refused(late) == 1
        assert not house._queue._held

    timeless.run(scene())


def test_of_those_who_wait_the_best_priority_goes_first_and_keys_alike_take_turns() -> None:
    async def scene() -> None:
        house = places()
        full = inside([*await crowd(house, "first", 1, choices=48), *await crowd(house, "second", 1, choices=16)])
        order: list[str] = []

        async def wait(key: str, priority: int) -> None:
            await house.enter(key, 1, 10, priority)
            order.append(key)

        waiting = [
            asyncio.create_task(wait(key, priority))
            for key, priority in [("late", 5), ("late", 5), ("a", 0), ("a", 0), ("b", 0), ("soon", -1)]
        ]
        await asyncio.sleep(0)
        house.leave(full[1])
        await asyncio.gather(*waiting)
        assert order == ["soon", "a", "b", "a", "late", "late"]

    timeless.run(scene())
