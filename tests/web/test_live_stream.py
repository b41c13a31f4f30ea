"""The stream of samples: history first, then one a second; who goes, who does not read, and what is told at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.engine.hang import Hang
from phalanx.errors import EngineDeadError
from phalanx.server.engine_client import RankHealth
from phalanx.server.errors import ApiError
from phalanx.server.messages import Loading, Started
from phalanx.server.recent import Recent
from phalanx.web import live as module
from phalanx.web.live import Live, LiveStream
from phalanx.web.sampler import KEPT

STARTED = Started(vocab=100, max_model_len=64, max_num_seqs=4, num_blocks=8, block_size=16, stop_tokens=[])


class Client:
    """Reads a stream as it likes."""

    def __init__(self, live: Live, seconds: int = KEPT, client: str = "") -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()
        self.aborted = False
        scope = {"type": "http", "extensions": {"abort": self._abort}}
        self.task = asyncio.create_task(LiveStream(live, seconds, client)(scope, self._receive, self._send))

    def _abort(self) -> None:
        self.aborted = True

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    async def _receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def events(self) -> list[Any]:
        bodies = b"".join(message["body"] for message in self.sent if "body" in message)
        return [json.loads(part.removeprefix(b"data: ")) for part in bodies.split(b"\n\n") if part]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Place:
    def __init__(self) -> None:
        self.engine = SimpleNamespace(
            started=STARTED,
            loading=Loading(5, 5),
            live=0,
            hang=None,
            totals=dict,
            ranks=lambda: [RankHealth(0, "here", 7, 0.1, 0.0, False)],
        )
        self.supervisor: Any = SimpleNamespace(state="ready", death=None, client=self.engine, restarts_left=1)
        self.live = Live(self.supervisor, Recent())

    async def tick(self, count: int = 1) -> None:
        """As the server's own loop does, without its seconds."""
        for _ in range(count):
            self.live.tick()
            await settle()


def play(scene: Callable[[Place], Awaitable[None]]) -> None:
    """In a thread of its own: where a browser was used before, this one has a loop already."""

    async def run() -> None:
        await scene(Place())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, run()).result()


def test_history_comes_first_and_then_one_sample_at_a_time() -> None:
    async def scene(place: Place) -> None:
        await place.tick(5)
        client = Client(place.live)
        await settle()
        await place.tick(2)
        assert [len(event["samples"]) for event in client.events] == [5, 1, 1]
        times = [sample["t"] for event in client.events for sample in event["samples"]]
        assert times == sorted(times)
        state = client.events[0]["state"]
        assert (state["status"], state["max_num_seqs"], state["kv_tokens"]) == ("ready", 4, 128)
        assert state["ranks"] == [
            {"rank": 0, "node": "here", "step": 7, "beat_age_s": 0.1, "busy_s": 0.0, "stuck": False}
        ]
        client.task.cancel()

    play(scene)


def test_a_long_history_comes_in_slices_with_room_for_others_between() -> None:
    async def scene(place: Place) -> None:
        for _ in range(700):
            place.live.tick()
        client = Client(place.live)
        await settle()
        await place.tick()
        assert [len(event["samples"]) for event in client.events] == [300, 300, 100, 1]
        times = [sample["t"] for event in client.events for sample in event["samples"]]
        assert times == sorted(times)
        client.task.cancel()

    play(scene)


def test_a_stream_that_is_over_is_told_to_its_end() -> None:
    async def scene(place: Place) -> None:
        for _ in range(700):
            place.live.tick()
        place.supervisor.state = "dead"
        client = Client(place.live)
        await settle()
        assert [len(event["samples"]) for event in client.events] == [300, 300, 100]
        assert client.task.done()

    play(scene)


def test_viewers_are_bounded_and_one_key_leaves_seats_to_others() -> None:
    async def scene(place: Place) -> None:
        live = Live(place.supervisor, Recent(), shared=True)
        crowd = [Client(live, client="a") for _ in range(96)]
        with pytest.raises(ApiError, match="Too many watch"):
            LiveStream(live, 1, "a")
        other = Client(live, client="b")
        await settle()
        assert live.viewers == 97
        for client in crowd:
            client.left.set()
        await settle()
        assert (live.viewers, live.seats.held("a")) == (1, 0)
        other.task.cancel()

    play(scene)


def test_a_stream_begins_as_far_back_as_it_is_asked_to() -> None:
    async def scene(place: Place) -> None:
        await place.tick(9)
        client = Client(place.live, seconds=4)
        await settle()
        await place.tick(1)
        assert [len(event["samples"]) for event in client.events] == [4, 1]
        client.task.cancel()

    play(scene)


def test_viewers_get_the_same_bytes_made_once() -> None:
    async def scene(place: Place) -> None:
        await place.tick(1)
        clients = [Client(place.live) for _ in range(3)]
        await settle()
        await place.tick(1)
        last = [client.sent[-1]["body"] for client in clients]
        assert last[0] is last[1] is last[2]
        for client in clients:
            client.task.cancel()

    play(scene)


def test_a_stream_ends_with_its_client_and_is_counted_no_more() -> None:
    async def scene(place: Place) -> None:
        clients = [Client(place.live) for _ in range(50)]
        await settle()
        assert place.live.viewers == 50
        for client in clients:
            client.left.set()
        await settle()
        assert place.live.viewers == 0
        assert all(client.task.done() for client in clients)
        before = [len(client.sent) for client in clients]
        await place.tick(3)
        assert [len(client.sent) for client in clients] == before

    play(scene)


def test_a_reader_that_pauses_gets_what_it_missed_at_once_and_never_more_than_is_kept() -> None:
    async def scene(place: Place) -> None:
        client = Client(place.live)
        await settle()
        client.reads.clear()
        await place.tick(KEPT + 30)
        client.reads.set()
        await settle()
        await place.tick(1)
        counts = [len(event["samples"]) for event in client.events]
        assert counts == [0, 1, *[300] * (KEPT // 300)]
        client.task.cancel()

    play(scene)


def test_a_reader_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_WRITE_S", 0.01)

    async def scene(place: Place) -> None:
        client = Client(place.live)
        await settle()
        client.reads.clear()
        await place.tick(1)
        await asyncio.wait_for(client.task, 30)
        assert client.aborted
        assert place.live.viewers == 0

    play(scene)


def test_a_dead_engine_is_told_with_its_reason_and_ends_the_stream() -> None:
    async def scene(place: Place) -> None:
        client = Client(place.live)
        await settle()
        place.supervisor.state = "dead"
        place.supervisor.death = EngineDeadError("engine_died", "It was killed.\nTraceback", "Look at dmesg.")
        await place.tick(1)
        await asyncio.wait_for(client.task, 30)
        state = client.events[-1]["state"]
        assert (state["status"], state["ranks"]) == ("dead", [])
        fix = "Look at dmesg. The server's log has more."
        assert state["reason"] == {"code": "engine_died", "found": "It was killed.", "fix": fix}
        assert client.sent[-1]["more_body"] is False

    play(scene)


def test_a_server_that_drains_is_watched_until_its_last_request() -> None:
    async def scene(place: Place) -> None:
        client = Client(place.live)
        await settle()
        place.supervisor.state, place.engine.live = "draining", 1
        await place.tick(2)
        assert not client.task.done()
        place.engine.live = 0
        await place.tick(1)
        await asyncio.wait_for(client.task, 30)
        assert client.events[-1]["state"]["status"] == "draining"

    play(scene)


def test_an_engine_that_loads_tells_how_far_it_is() -> None:
    async def scene(place: Place) -> None:
        place.supervisor.state, place.engine.started, place.engine.loading = "starting", None, Loading(2, 5)
        place.engine.ranks = list
        client = Client(place.live)
        await settle()
        state = client.events[0]["state"]
        assert (state["status"], state["loaded"], state["device"]) == ("starting", 0.4, None)
        client.task.cancel()

    play(scene)


def test_a_stuck_rank_is_the_state() -> None:
    async def scene(place: Place) -> None:
        place.engine.ranks = lambda: [
            RankHealth(0, "here", 7, 0.1, 0.0, False),
            RankHealth(1, "here", 7, 9.0, 0.0, True),
        ]
        assert (place.live.state().status, place.live.state().reason) == ("stuck", None)
        place.engine.hang = Hang([1], "rank_stopped", "Rank 1 is stopped.")
        reason = place.live.state().reason
        assert reason is not None
        assert (reason["code"], reason["found"]) == ("rank_stopped", "Rank 1 is stopped.")

    play(scene)
