"""GrammarCompiler: the server's side of the process in which grammars are tried out."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phalanx.errors import ConfigError, RequestError
from phalanx.runtime import child
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.messages import (
    LENGTH_BYTES,
    Assignment,
    Proven,
    Ready,
    Refused,
    Reply,
    decode_reply,
    packed,
)

_MEMORY_BYTES = 2**30
_CACHE_BYTES = 64 * 2**20
_MOST_WAITING = 64
_START_LIMIT_S = 120.0


class GrammarCompiler:
    """Turns constraints into grammars that the engine can trust to compile, to end and to be quick.

    A constraint comes from a client, so it is tried out in a process of its own, one at a time, with bounded time and
    memory. Where it takes too long or takes the process down, that request alone fails, and another process is started.
    """

    def __init__(self, model_path: Path, vocab: int, eos_token_ids: Sequence[int], time_limit_s: float = 10.0) -> None:
        self._assignment = Assignment(str(model_path), vocab, list(eos_token_ids), time_limit_s, _MEMORY_BYTES)
        self._process: asyncio.Task[Process] | None = None
        self._turn = asyncio.Lock()
        self._tried: OrderedDict[Constraint, Proven | Refused] = OrderedDict()
        self._tried_bytes = 0
        self._trials: dict[Constraint, asyncio.Task[Proven | Refused]] = {}

    async def start(self) -> None:
        """Start the process, which takes seconds; else the first constraint does, and waits for it."""
        await self._started()

    async def compile(self, constraint: Constraint) -> bytes:
        """The grammar for `Grammars.matcher` in the engine. RequestError if the constraint is no good."""
        constraint.check_size()
        verdict = self._remembered(constraint)
        if verdict is None:
            verdict = await asyncio.shield(self._trial(constraint))
        if isinstance(verdict, Refused):
            raise RequestError(verdict.code, verdict.found, verdict.fix)
        return verdict.grammar

    async def close(self) -> None:
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        await self._end()

    def _trial(self, constraint: Constraint) -> asyncio.Task[Proven | Refused]:
        """Those who ask for the same at the same time share one trial, and none of them can break it off."""
        if constraint not in self._trials:
            if len(self._trials) >= _MOST_WAITING:
                raise RequestError(
                    "too_many_grammars", f"{_MOST_WAITING} new grammars are waiting already.", "Try again later."
                )
            trial = self._trials[constraint] = asyncio.create_task(self._try(constraint))
            trial.add_done_callback(lambda done: self._trials.pop(constraint))
            trial.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._trials[constraint]

    async def _try(self, constraint: Constraint) -> Proven | Refused:
        async with self._turn:
            process = await self._started()
            try:
                async with asyncio.timeout(self._assignment.time_limit_s):
                    reply = await _exchange(process, constraint)
            except TimeoutError:
                reply = _too_complex(f"takes more than {self._assignment.time_limit_s:g} s to compile")
                await self._replace()
            except (asyncio.IncompleteReadError, ConnectionError):
                reply = _too_complex("takes more memory than there is to compile")
                await self._replace()
        assert not isinstance(reply, Ready)
        self._remember(constraint, reply)
        return reply

    def _remembered(self, constraint: Constraint) -> Proven | Refused | None:
        if constraint in self._tried:
            self._tried.move_to_end(constraint)
        return self._tried.get(constraint)

    def _remember(self, constraint: Constraint, reply: Proven | Refused) -> None:
        """Keep the last ones, refusals too: a bad grammar costs its time once."""
        self._tried[constraint] = reply
        self._tried_bytes += _size(constraint, reply)
        while self._tried_bytes > _CACHE_BYTES:
            self._tried_bytes -= _size(*self._tried.popitem(last=False))

    async def _started(self) -> Process:
        """The process, alive and ready. One that ended while it had nothing to do is replaced without ado."""
        if self._process is None:
            self._process = asyncio.create_task(_spawn(self._assignment))
        try:
            process = await asyncio.shield(self._process)
        except ConfigError:
            self._process = None
            raise
        if process.returncode is not None:
            await self._replace()
            return await self._started()
        return process

    async def _replace(self) -> None:
        await self._end()
        self._process = asyncio.create_task(_spawn(self._assignment))

    async def _end(self) -> None:
        starting, self._process = self._process, None
        if starting is not None:
            starting.cancel()
            (process,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(process, Process):
                await _kill(process)


async def _spawn(assignment: Assignment) -> Process:
    """A process that has said that it is ready."""
    process = await asyncio.create_subprocess_exec(
        *child.command("phalanx.server.grammar.worker"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env=child.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            reply = await _exchange(process, assignment)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        await _kill(process)
        found = f"The process that compiles grammars ended with status {process.returncode} before it was ready."
        raise ConfigError("grammar_compiler_failed", found, "Run `python -m phalanx.server.grammar.worker`.") from None
    except BaseException:
        await _kill(process)
        raise
    if isinstance(reply, Refused):
        await process.wait()
        raise ConfigError(reply.code, reply.found, reply.fix)
    return process


async def _exchange(process: Process, message: msgspec.Struct) -> Reply:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(packed(message))
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    return decode_reply(await process.stdout.readexactly(length))


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _too_complex(why: str) -> Refused:
    return Refused(
        "grammar_too_complex",
        f"The grammar {why}.",
        "Write it with fewer alternatives, smaller repetitions and less nesting.",
    )


def _size(constraint: Constraint, reply: Proven | Refused) -> int:
    return len(constraint.source) + (len(reply.grammar) if isinstance(reply, Proven) else len(reply.found))
