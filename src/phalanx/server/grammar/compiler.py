"""GrammarCompiler: the server's side of the processes in which grammars are tried out."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, RequestError
from phalanx.server.fairness import Shares, Turns
from phalanx.server.forked import Lane
from phalanx.server.forked_client import Forked, Lost
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.messages import CompilerAssignment, CompilerReady, NoGrammar, Proven, decode_reply, encode

WORKER_MODULE = "phalanx.server.grammar.worker"
QUICK, SLOW = 0, 1
_QUICK_S = 0.25
_MEMORY_BYTES = 2**30
_NICENESS = 10
_CACHE_BYTES = 64 * 2**20
_MOST_WAITING = 64


class GrammarCompiler:
    """Turns constraints into grammars that the engine can trust to compile, to end and to be quick.

    A constraint comes from a client, so it is tried out in a process that can be spared, with bounded time and memory:
    first for a moment, and if that is too short, in another where only such ones wait. Keys take turns at both. Where a
    constraint takes too long or takes its process down, that request alone fails. `shared` says that there are
    several keys.
    """

    def __init__(
        self,
        model_path: Path,
        vocab: int,
        eos_token_ids: Sequence[int],
        time_limit_s: float = 10.0,
        shared: bool = False,
    ) -> None:
        lanes = [Lane(limit, _MEMORY_BYTES, _NICENESS) for limit in (min(_QUICK_S, time_limit_s), time_limit_s)]
        self._time_limit_s = time_limit_s
        self._assignment = CompilerAssignment(str(model_path), vocab, list(eos_token_ids), lanes)
        self._processes = Forked(WORKER_MODULE, lanes)
        self._started: asyncio.Task[None] | None = None
        self._turns = Turns(), Turns()
        self._places = Shares(_MOST_WAITING, shared)
        self._tried: OrderedDict[Constraint, Proven | NoGrammar] = OrderedDict()
        self._tried_bytes = 0
        self._trials: dict[Constraint, _Trial] = {}

    async def start(self) -> None:
        """Start the processes, which takes seconds; else the first constraint does, and waits for it."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        try:
            await asyncio.shield(self._started)
        except ConfigError:
            self._started = None
            raise

    async def _start(self) -> None:
        ready = decode_reply(await self._processes.start(encode(self._assignment)))
        if isinstance(ready, NoGrammar):
            await self._processes.close()
            raise ConfigError(ready.code, ready.found, ready.fix)
        assert isinstance(ready, CompilerReady)

    async def compile(self, constraint: Constraint, client: str = "") -> bytes:
        """The grammar for `Grammars.matcher` in the engine. RequestError if the constraint is no good."""
        constraint.check_size()
        verdict = self._remembered(constraint)
        if verdict is None:
            verdict = await self._trial(constraint, client).verdict()
        if isinstance(verdict, NoGrammar):
            raise RequestError(verdict.code, verdict.found, verdict.fix)
        return verdict.grammar

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [trial.work for trial in self._trials.values()]
        tasks += [self._started] if self._started is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._processes.close()

    def _trial(self, constraint: Constraint, client: str) -> _Trial:
        """Those who ask for the same at the same time share one trial."""
        if constraint not in self._trials:
            if not self._places.take(client, 1):
                raise RequestError(
                    "too_many_grammars", "Too many new grammars are waiting already.", "Try again later."
                )
            trial = self._trials[constraint] = _Trial(asyncio.create_task(self._try(constraint, client)))
            trial.work.add_done_callback(lambda done: self._end_trial(constraint, client))
        return self._trials[constraint]

    def _end_trial(self, constraint: Constraint, client: str) -> None:
        del self._trials[constraint]
        self._places.give(client, 1)

    async def _try(self, constraint: Constraint, client: str) -> Proven | NoGrammar:
        await self.start()
        try:
            reply = await self._ask(QUICK, constraint, client)
        except Lost:
            try:
                reply = await self._ask(SLOW, constraint, client)
            except Lost:
                reply = _too_complex(self._time_limit_s)
        self._remember(constraint, reply)
        return reply

    async def _ask(self, lane: int, constraint: Constraint, client: str) -> Proven | NoGrammar:
        async with self._turns[lane].turn(client):
            reply = decode_reply(await self._processes.ask(lane, encode(constraint)))
        assert not isinstance(reply, CompilerReady)
        return reply

    def _remembered(self, constraint: Constraint) -> Proven | NoGrammar | None:
        if constraint in self._tried:
            self._tried.move_to_end(constraint)
        return self._tried.get(constraint)

    def _remember(self, constraint: Constraint, reply: Proven | NoGrammar) -> None:
        """Keep the last ones, refusals too: a bad grammar costs its time once."""
        self._tried[constraint] = reply
        self._tried_bytes += _size(constraint, reply)
        while self._tried_bytes > _CACHE_BYTES:
            self._tried_bytes -= _size(*self._tried.popitem(last=False))


class _Trial:
    """Goes on while someone waits for it."""

    def __init__(self, work: asyncio.Task[Proven | NoGrammar]) -> None:
        self.work = work
        self._waiting = 0

    async def verdict(self) -> Proven | NoGrammar:
        self._waiting += 1
        try:
            return await asyncio.shield(self.work)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.work.cancel()


def _too_complex(time_limit_s: float) -> NoGrammar:
    return NoGrammar(
        "grammar_too_complex",
        f"The grammar takes more than {time_limit_s:g} s or {_MEMORY_BYTES >> 20} MiB to compile.",
        "Write it with fewer alternatives, smaller repetitions and less nesting.",
    )


def _size(constraint: Constraint, reply: Proven | NoGrammar) -> int:
    return len(constraint.source) + (len(reply.grammar) if isinstance(reply, Proven) else len(reply.found))
