"""The live view's stream: past samples at once, then one a second, with the state of engine, ranks and GPUs."""

from __future__ import annotations

import asyncio
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.doctor.finding import Finding
from phalanx.engine.hang import Hang
from phalanx.errors import EngineDeadError
from phalanx.runtime.config import EngineConfig
from phalanx.server.engine_client import RankHealth
from phalanx.server.errors import ApiError
from phalanx.server.fairness import Shares
from phalanx.server.gpu_watch import GpuReading, GpuWatch
from phalanx.server.incoming import client_of
from phalanx.server.recent import Recent
from phalanx.server.supervisor import Supervisor, condition
from phalanx.spec import Layout
from phalanx.web.expect import Expectation, expectation
from phalanx.web.notes import notes_of
from phalanx.web.sampler import EVERY_S, KEPT, LoadSampler, Sample
from phalanx.weights.checkpoint import Checkpoint, locate

STUCK_WRITE_S = 30.0
MOST_VIEWERS = 128
_NOTES_EVERY = 5
_MOST_IN_ONE = 300
"""Samples of an event: an hour's at once would hold up other clients."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is right now. `reason` is why there is none or why it is stuck, `loaded` how much of its weights
    are there, `notes` what there is to say of its last minute.
    """

    status: str
    reason: dict[str, str] | None
    loaded: float | None
    restarts_left: int
    requests: int
    device: str | None
    max_num_seqs: int | None
    kv_tokens: int | None
    ranks: list[RankHealth]
    expected: dict[str, str] | None
    viewers: int
    notes: list[Finding] = []
    gpus: list[GpuReading] = []


class Event(msgspec.Struct, frozen=True):
    state: EngineState
    samples: list[Sample]


class Live:
    """Samples while the server runs, and tells all who watch. Every stream reads from the same ring: none has a queue
    of its own that a slow reader could fill.
    """

    def __init__(
        self, supervisor: Supervisor, recent: Recent, gpus: GpuWatch | None = None, shared: bool = False
    ) -> None:
        self.viewers = 0
        self.seats = Shares(MOST_VIEWERS, shared)
        self._gpus = gpus or GpuWatch()
        self.sampler = LoadSampler(supervisor, recent, self._gpus.readings)
        self._supervisor = supervisor
        self._fresh = asyncio.Event()
        self._latest: tuple[int, bytes] = (-1, b"")
        self._shares: list[float] = []
        self.notes: list[Finding] = []

    async def run(self) -> None:
        """For ever: a sample a second. What to expect is known once the engine says what it runs on."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + EVERY_S, loop.time())
            await asyncio.sleep(due - loop.time())
            started = self._supervisor.client.started
            if self.sampler.expectation is None and started is not None:
                config = self._supervisor.launch.config
                if started.device != "cpu":
                    self._gpus.start()
                self.sampler.expectation, self._shares = await asyncio.to_thread(_known, config, started.device)
            self.tick()

    def tick(self) -> None:
        """Take a sample and tell all who wait for one."""
        self.sampler.sample()
        if self.sampler.taken % _NOTES_EVERY == 0:
            started = self._supervisor.client.started
            on_gpus = started is not None and started.device != "cpu"
            self.notes = notes_of(list(self.sampler.samples), on_gpus, self._shares)
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    @property
    def is_over(self) -> bool:
        """Nothing will happen any more: the server ends, and waits for its streams to end first."""
        state = self._supervisor.state
        return state == "dead" or (state == "draining" and self._supervisor.client.live == 0)

    async def next(self) -> None:
        """Wait for the next sample."""
        await self._fresh.wait()

    def event_since(self, taken: int) -> tuple[bytes, int]:
        """What is new since so many samples had been taken, or the first of it, and up to which sample that is.

        Nearly all streams ask for the latest one: made once.
        """
        now = self.sampler.taken
        missed = min(now - taken, len(self.sampler.samples))
        if missed != 1:
            told = min(missed, _MOST_IN_ONE)
            return self._event(missed, told), now - missed + told
        if self._latest[0] != now:
            self._latest = now, self._event(1, 1)
        return self._latest[1], now

    def _event(self, missed: int, told: int) -> bytes:
        samples = self.sampler.samples
        first = len(samples) - missed
        event = Event(self.state(), list(islice(samples, first, first + told)))
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def state(self) -> EngineState:
        supervisor, client = self._supervisor, self._supervisor.client
        ranks, started, loading = client.ranks(), client.started, client.loading
        death, expected = supervisor.death, self.sampler.expectation
        status = condition(supervisor.state, ranks)
        return EngineState(
            status=status,
            reason=_reason(death) if death is not None else _hang(client.hang) if status == "stuck" else None,
            loaded=round(loading.done / max(loading.total, 1), 3) if loading is not None and started is None else None,
            restarts_left=supervisor.restarts_left,
            requests=client.live,
            device=started.device if started is not None else None,
            max_num_seqs=started.max_num_seqs if started is not None else None,
            kv_tokens=started.num_blocks * started.block_size if started is not None else None,
            ranks=ranks if death is None else [],
            expected={"kind": expected.kind, "source": expected.source} if expected is not None else None,
            viewers=self.viewers,
            notes=self.notes if death is None else [],
            gpus=self._gpus.readings(),
        )


def _reason(death: EngineDeadError) -> dict[str, str]:
    """Without the traceback: that is for the log."""
    found, _, more = death.found.partition("\n")
    return {"code": death.code, "found": found, "fix": f"{death.fix} The server's log has more." if more else death.fix}


def _hang(hang: Hang | None) -> dict[str, str] | None:
    """Who holds up the step, once that is known. The stacks are for the log."""
    return None if hang is None else {"code": hang.code, "found": hang.found, "fix": hang.fix}


def _known(config: EngineConfig, device: str) -> tuple[Expectation, list[float]]:
    """What to expect of steps, and each rank's share of the weights, of 1 if even."""
    spec = Checkpoint(locate(config.model), config.load_format).spec.keeping_states_in(config.state_dtype)
    layout = Layout(spec, config.tp)
    held = [layout.weight_bytes(rank, spec.number_format) for rank in range(config.tp)]
    return expectation(spec, device, config.tp), [each * config.tp / sum(held) for each in held]


class LiveStream(Response):
    """Sends seconds of the past, then what comes, until the client goes or reads no more, or the server ends."""

    def __init__(self, live: Live, seconds: int = KEPT, client: str = "") -> None:
        if not live.seats.take(client, 1):
            raise ApiError(429, "Too many watch already.", "too_many_viewers", headers={"retry-after": "10"})
        self.status_code = 200
        self.background = None
        self._live = live
        self._seconds = seconds
        self._client = client

    @cached_property
    def _head(self) -> dict[str, Any]:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = asyncio.create_task(self._tell(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._live.viewers += 1
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done() and isinstance(telling.exception(), TimeoutError):
                scope["extensions"]["abort"]()
            elif telling.done():
                telling.result()
        finally:
            self._live.viewers -= 1
            self._live.seats.give(self._client, 1)
            telling.cancel()
            gone.cancel()

    async def _tell(self, send: Send) -> None:
        live, more = self._live, True
        taken = max(live.sampler.taken - self._seconds, 0)
        await send(self._head)
        while more:
            event, taken = live.event_since(taken)
            is_behind = taken < live.sampler.taken
            more = is_behind or not live.is_over
            async with asyncio.timeout(STUCK_WRITE_S):
                await send({"type": "http.response.body", "body": event, "more_body": more})
            if is_behind:
                await asyncio.sleep(0)
            elif more:
                await live.next()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def live_route(live: Live) -> APIRouter:
    router = APIRouter(prefix="/cockpit", include_in_schema=False)

    @router.get("/live")
    async def watch(request: Request, seconds: Annotated[int, Query(ge=1, le=KEPT)] = KEPT) -> Response:
        return LiveStream(live, seconds, client_of(request))

    @router.get("/notes")
    async def notes() -> list[dict[str, str]]:
        return [msgspec.to_builtins(note) for note in live.notes]

    return router
