"""Which deaths of an engine are survived, who hears of them, and how many requests are let in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from phalanx.errors import EngineDeadError
from phalanx.runtime.config import EngineConfig
from phalanx.server import supervisor as module
from phalanx.server.engine_client import EngineLaunch
from phalanx.server.errors import ApiError
from phalanx.server.messages import Started
from phalanx.server.pace import FreeingPace
from phalanx.server.supervisor import Supervisor

STARTED = Started(vocab=100, max_model_len=64, max_num_seqs=4, num_blocks=8, block_size=16, stop_tokens=[])


class FakeEngine:
    """An engine whose life the test decides: `start` and `die` are set from outside."""

    made: list[FakeEngine]
    starts: bool = True

    def __init__(self, launch: EngineLaunch, on_step: object) -> None:
        self.started: Started | None = None
        self.live = 0
        self.pace = FreeingPace()
        self.died: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self.told: list[ApiError] = []
        self.stopped = False
        self.stop_takes_s = 0.0
        FakeEngine.made.append(self)

    async def start(self) -> Started:
        if not FakeEngine.starts:
            raise death("no_start")
        self.started = STARTED
        return STARTED

    def succeed(self, dead: FakeEngine, error: ApiError) -> int:
        dead.close_mailboxes(error)
        self.heir_of = dead
        return 0

    def run_again(self) -> None:
        self.resumed = True

    async def death(self) -> EngineDeadError:
        return await self.died

    def close_mailboxes(self, error: ApiError) -> None:
        assert not self.stopped
        self.told.append(error)

    async def stop(self) -> None:
        await asyncio.sleep(self.stop_takes_s)
        self.stopped = True


def death(code: str = "rank_died") -> EngineDeadError:
    return EngineDeadError(code, "found", "fix")


Scene = Callable[[Supervisor, "asyncio.Task[EngineDeadError]", list[float]], Awaitable[None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scene with a supervised engine; the list holds the pauses before restarts, which take no time here."""
    monkeypatch.setattr(module, "EngineClient", FakeEngine)
    monkeypatch.setattr(FakeEngine, "starts", True)
    FakeEngine.made = []

    def run(scene: Scene, restarts: int = 0, max_queued: int = 2, starts: bool = True) -> None:
        FakeEngine.starts = starts
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def short(seconds: float) -> None:
            if seconds >= 1:
                pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr(module.asyncio, "sleep", short)

        async def go() -> None:
            made = Supervisor(EngineLaunch(EngineConfig(), 10, "none"), restarts, max_queued, lambda report: None)
            ready: list[Started] = []
            life = asyncio.create_task(made.run(ready.append))
            await settle()
            await scene(made, life, pauses)
            life.cancel()

        asyncio.run(go())

    return run


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def last() -> FakeEngine:
    return FakeEngine.made[-1]


def test_an_engine_that_runs_takes_requests_up_to_batch_and_queue(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        assert supervisor.state == "ready"
        for live, choices in [(0, 6), (5, 1), (3, 3)]:
            last().live = live
            assert supervisor.admit(choices) is last()
        for live, choices in [(0, 7), (6, 1), (5, 2)]:
            last().live = live
            with pytest.raises(ApiError) as caught:
                supervisor.admit(choices)
            assert caught.value.status_code == 429
            assert caught.value.headers["retry-after"] == "10"
        last().pace.one_ended()
        with pytest.raises(ApiError) as caught:
            supervisor.admit(3)
        assert caught.value.headers["retry-after"] == "2"

    play(scene, max_queued=2)


def test_requests_are_taken_when_what_is_made_beside_the_engine_is_there_too(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        other = Supervisor(supervisor.launch, 0, 0, lambda report: None)
        beside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run = asyncio.create_task(other.run(lambda started: None, beside))
        await settle()
        assert other.state == "starting"
        beside.set_result(None)
        await settle()
        assert other.state == "ready"
        run.cancel()

    play(scene)


def test_without_a_restart_a_death_is_final_and_told_to_whom_it_concerns(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        last().died.set_result(death())
        await settle()
        assert life.result().code == "rank_died"
        assert supervisor.state == "dead"
        assert supervisor.death is life.result()
        (told,) = last().told
        assert told.status_code == 500
        assert "found" not in told.detail
        assert last().stopped

    play(scene)


def test_an_engine_that_never_started_is_not_started_again(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        assert life.result().code == "no_start"
        assert len(FakeEngine.made) == 1
        assert last().stopped

    play(scene, restarts=5, starts=False)


def test_restarts_come_after_longer_and_longer_pauses_and_end(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        for number in range(9):
            assert supervisor.state == "ready"
            assert supervisor.death is None
            assert len(FakeEngine.made) == number + 1
            last().died.set_result(death())
            await settle()
        assert life.done()
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        assert all(engine.stopped for engine in FakeEngine.made)

    play(scene, restarts=8)


def test_restarts_of_more_than_ten_minutes_ago_do_not_count(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        for number in range(5):
            dead = last()
            dead.died.set_result(death())
            await settle()
            assert (last().heir_of, last().resumed, supervisor.state) == (dead, True, "ready")
            assert supervisor.restarts_left == (1 if number == 0 else 0)
            now[0] += 400
        last().died.set_result(death())
        now[0] -= 400
        await settle()
        assert life.result().code == "rank_died"
        assert pauses == [1, 2, 2, 2, 2]

    play(scene, restarts=2)


def test_a_restart_that_fails_counts_as_one(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        FakeEngine.starts = False
        last().died.set_result(death())
        await settle()
        assert life.result().code == "no_start"
        assert len(FakeEngine.made) == 3

    play(scene, restarts=2)


def test_between_two_lives_requests_are_sent_away(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        last().died.set_result(death())
        while supervisor.state == "ready":
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="restarting") as caught:
            supervisor.admit(1)
        assert caught.value.status_code == 503
        assert caught.value.headers["retry-after"]

    play(scene, restarts=1)


def test_a_server_that_stops_takes_no_more_and_starts_no_engine_again(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        supervisor.drain()
        with pytest.raises(ApiError, match="draining") as caught:
            supervisor.admit(1)
        assert caught.value.status_code == 503
        last().died.set_result(death())
        await settle()
        assert life.result().code == "rank_died"
        assert len(FakeEngine.made) == 1

    play(scene, restarts=3)


def test_told_to_stop_while_it_loads_it_does_not_become_ready(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        other = Supervisor(EngineLaunch(EngineConfig(), 10, "none"), 0, 0, lambda report: None)
        other.drain()
        loading = asyncio.create_task(other.run(lambda started: None))
        await settle()
        assert other.state == "draining"
        loading.cancel()

    play(scene)


def test_told_to_stop_after_a_death_it_stays_dead(play: Callable[..., None]) -> None:
    """Ending what is left of an engine takes seconds; a signal in between must not bring it back to life."""

    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        last().stop_takes_s = 0.5
        last().died.set_result(death())
        while supervisor.state == "ready":
            await asyncio.sleep(0)
        supervisor.drain()
        await settle()
        assert life.result().code == "rank_died"
        assert supervisor.restarts_left == 0

    play(scene)


def test_whoever_ends_the_supervisor_ends_the_engine(play: Callable[..., None]) -> None:
    async def scene(supervisor: Supervisor, life: Any, pauses: list[float]) -> None:
        life.cancel()
        await settle()
        assert last().stopped

    play(scene)


def test_an_engine_that_starts_again_waits_longer_for_its_machines() -> None:
    first = EngineLaunch(EngineConfig(tp=2, executor="ray"), 10, "none")
    assert first.again().config.node_wait_s > first.config.node_wait_s
    assert first.again().config.tp == 2
