"""Supervisor: keeps an engine alive, and says whether the server can take a request now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from phalanx.errors import EngineDeadError
from phalanx.server.engine_client import EngineClient, EngineLaunch, RankHealth
from phalanx.server.errors import ApiError, queue_full
from phalanx.server.messages import Started, Stepped

log = logging.getLogger("phalanx.server")

_LONGEST_PAUSE_S = 60.0
_COUNTED_S = 600.0


def condition(state: str, ranks: Sequence[RankHealth]) -> str:
    """The supervisor's state, or `stuck` if there is an engine of which a rank is."""
    return "stuck" if state in ("ready", "draining") and any(rank.stuck for rank in ranks) else state


class Supervisor:
    """Starts the engine, and again after a death, at most `restarts` times in ten minutes, after ever longer pauses.

    Requests that had no token yet run again on the next engine. An engine that dies before it ever took a request is
    not tried again: the same start would fail the same way. Nor is one that dies while the server stops.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        restarts: int,
        max_queued: int,
        on_step: Callable[[Stepped], None],
        on_restart: Callable[[int], None] = lambda run_again: None,
    ) -> None:
        self.state = "starting"
        self.last_death: EngineDeadError | None = None
        self.launch = launch
        self._restarts = restarts
        self._restarted: deque[float] = deque()
        self._max_queued = max_queued
        self._on_step = on_step
        self._on_restart = on_restart
        self.client = EngineClient(launch, on_step)

    @property
    def restarts_left(self) -> int:
        """Before the next death is final: those of the last ten minutes count."""
        while self._restarted and self._restarted[0] < time.monotonic() - _COUNTED_S:
            self._restarted.popleft()
        return self._restarts - len(self._restarted)

    @property
    def death(self) -> EngineDeadError | None:
        """Why there is no engine now."""
        return self.last_death if self.state in ("restarting", "dead") else None

    async def run(
        self, on_ready: Callable[[Started], None], beside: asyncio.Future[None] | None = None
    ) -> EngineDeadError:
        """Returns when the engine is dead for good. Requests are taken when what is made `beside` it is there too."""
        pause = 0.0
        while True:
            death = await self._live(pause, on_ready, beside)
            if self.state == "dead":
                return death
            pause = min(2.0 ** (len(self._restarted) - 1), _LONGEST_PAUSE_S)
            log.error("%s: %s", death.code, death)
            log.warning(
                "starting the engine again in %.0f s with %d requests that had no token yet; %d more times at most",
                pause,
                self.client.live,
                self.restarts_left,
            )

    async def _live(
        self, pause: float, on_ready: Callable[[Started], None], beside: asyncio.Future[None] | None
    ) -> EngineDeadError:
        """One life of the engine. Whatever was running at its end hears of it, or runs again in the next life."""
        client = self.client
        try:
            await asyncio.sleep(pause)
            try:
                started = await client.start()
                if beside is not None:
                    await asyncio.shield(beside)
                if self.state != "draining":
                    self.state = "ready"
                client.run_again()
                on_ready(started)
                death = await client.death()
            except EngineDeadError as error:
                death = error
            self.last_death = death
            if self.state in ("starting", "draining") or self.restarts_left == 0:
                self.state = "dead"
                client.close_mailboxes(ApiError.of(death))
            else:
                self.state = "restarting"
                self._restarted.append(time.monotonic())
                self.client = EngineClient(self.launch.again(), self._on_step)
                self._on_restart(self.client.succeed(client, ApiError.of(death)))
            return death
        finally:
            await client.stop()

    def admit(self, choices: int) -> EngineClient:
        """The engine to give a request of this many choices to; an ApiError if it cannot be taken now."""
        if self.state != "ready" or self.client.started is None:
            raise ApiError(503, f"The server is {self.state}.", f"server_{self.state}", headers={"retry-after": "1"})
        if self.client.live + choices > self.room:
            raise queue_full(
                f"{self.client.live} requests wait or run and {choices} more would exceed {self.room}.",
                self.client.pace.seconds_until(self.client.live + choices - self.room),
            )
        return self.client

    @property
    def room(self) -> int:
        """For requests that wait or run."""
        assert self.client.started is not None
        return self.client.started.max_num_seqs + self._max_queued

    def set_adapters(self, lora: dict[str, str]) -> None:
        """Those that an engine is started with from now on."""
        self.launch = replace(self.launch, config=msgspec.structs.replace(self.launch.config, lora=lora))

    def drain(self) -> None:
        """Take no more requests. What is dead stays dead."""
        if self.state != "dead":
            self.state = "draining"
