"""Sends queries when they are due, and keeps what came of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from phalanx.bench.serving.client import Client, Query, clock
from phalanx.bench.serving.measure import RequestTrace


class LoadRun:
    """One run of queries. What is `finished` and `running` may be read at any time, also after a cancelled run."""

    def __init__(self, client: Client, max_concurrency: int | None) -> None:
        self.finished: list[RequestTrace] = []
        self.running: set[RequestTrace] = set()
        self._client = client
        self._slot: AbstractAsyncContextManager[object] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._began = clock()
        self._ended: float | None = None

    @property
    def duration(self) -> float:
        """Seconds from the start to the end, or to now."""
        return (clock() if self._ended is None else self._ended) - self._began

    async def run(self, queries: Sequence[Query], times: Sequence[float]) -> None:
        """Send each at its time after now, and wait for all answers."""
        self._began = clock()
        try:
            async with asyncio.TaskGroup() as tasks:
                for query, after in zip(queries, times, strict=True):
                    due = self._began + after
                    if (wait := due - clock()) > 0:
                        await asyncio.sleep(wait)
                    tasks.create_task(self._send(query, due))
        finally:
            self._ended = clock()

    async def _send(self, query: Query, due: float) -> None:
        """Locks and semaphores serve in the order of asking, so requests of an agent and of all keep their order."""
        trace = RequestTrace(due=due, taken=clock())
        turn = nullcontext() if query.agent is None else self._turns[query.agent]
        async with turn, self._slot:
            self.running.add(trace)
            await self._client.ask(query, trace)
            self.running.remove(trace)
            self.finished.append(trace)
