"""EngineClient: the API process's side of one engine process, from its start to its death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

import msgspec
import zmq

from phalanx.engine.hang import Hang
from phalanx.engine.marks import StepTraces
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Beat, Totals
from phalanx.errors import EngineDeadError, RequestError
from phalanx.runtime import child
from phalanx.runtime.channel import Receiver, Sender
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.memory_limit import fix_of
from phalanx.server.errors import ApiError
from phalanx.server.hang_watch import HangWatch
from phalanx.server.mailbox import MOST_UNREAD, Mailbox
from phalanx.server.messages import (
    Books,
    Cancel,
    ChangeAdapter,
    Death,
    EndTrace,
    EngineReport,
    Loading,
    Order,
    Pulses,
    Refused,
    ResetPrefixes,
    Settled,
    Started,
    Startup,
    Stepped,
    Submit,
    TraceAsked,
    Traced,
    death_file,
    decode_report,
    encode,
    orders_address,
    reports_address,
)
from phalanx.server.pace import FreeingPace

ENGINE_MODULE = "phalanx.server.engine_process"
SILENT_AFTER_S = 5.0
GIVEN_UP_AFTER_S = 30.0
_STOP_WAIT_S = 5.0
_NODES_RETURN_WITHIN_S = 120.0
_LOOK_EVERY_S = 1.0
_RECEIVE_SLICE_S = 0.02
_MOST_LIVES = 2
_TRACE_TOLD_WITHIN_S = 30.0


@dataclass(frozen=True)
class EngineLaunch:
    """How an engine process is started. `module` is run by Python and must call `engine_process.main`."""

    config: EngineConfig
    step_timeout_s: float
    module: str

    def again(self) -> EngineLaunch:
        """After a death: machines that went with it are given time to come back."""
        waiting = max(self.config.node_wait_s, _NODES_RETURN_WITHIN_S)
        return replace(self, config=msgspec.structs.replace(self.config, node_wait_s=waiting))


@dataclass(frozen=True)
class RankHealth:
    """What is known of a rank: `beat_age_s` since it last gave a sign, `busy_s` in its present step."""

    rank: int
    node: str
    step: int
    beat_age_s: float
    busy_s: float
    stuck: bool

    @property
    def silent(self) -> bool:
        return self.beat_age_s > SILENT_AFTER_S


@dataclass
class Pending:
    """A request that waits or runs: where its tokens go, and what runs it again if the engine dies before the first."""

    mailbox: Mailbox
    choice: int
    order: Submit
    lives: int = 1


class EngineClient:
    """Starts the engine process, hands it requests, and puts the tokens that come back into mailboxes.

    After a death, `successor` is the client of the next process; it has the requests that run again.
    """

    def __init__(self, launch: EngineLaunch, on_step: Callable[[Stepped], None]) -> None:
        self.launch = launch
        self.loading: Loading | None = None
        self.started: Started | None = None
        self.books: Books | None = None
        self.pace = FreeingPace()
        self._on_step = on_step
        self._pending: dict[int, Pending] = {}
        self._successor: EngineClient | None = None
        self._orders: Sender | None = None
        self._receiving: asyncio.Handle | None = None
        self._unsettled: dict[int, asyncio.Future[None]] = {}
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._traced: tuple[int, asyncio.Future[StepTraces | None]] | None = None
        self._next_id = 0
        self._verdict: Death | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
        self._token = secrets.token_hex(16)
        self._watch = HangWatch(self._folder)

    @property
    def hang(self) -> Hang | None:
        """Who holds up a step, if nothing has moved in it for a while."""
        return self._watch.hang

    async def start(self) -> Started:
        """Run the process until it takes requests. EngineDeadError says why it does not."""
        loop, context = asyncio.get_running_loop(), zmq.Context()
        self._context = context
        self._reports = Receiver(context, reports_address(self._folder), self._token)
        self._orders = Sender(context, orders_address(self._folder), self._token)
        loop.add_reader(self._reports, self._hear)
        ready = self._ready = loop.create_future()
        self._spawning = asyncio.create_task(self._spawn())
        self._process = await asyncio.shield(self._spawning)
        exited = asyncio.create_task(self._process.wait())
        await asyncio.wait({ready, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise await self._death()
        exited.cancel()
        return ready.result()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """In a group of its own: a Ctrl-C is for the API process, and a stuck engine can be ended with its ranks."""
        process = await asyncio.create_subprocess_exec(
            *child.command(self.launch.module),
            stdin=asyncio.subprocess.PIPE,
            env=child.environment(),
            preexec_fn=os.setpgrp,
        )
        assert process.stdin is not None
        startup = Startup(self.launch.config, str(self._folder), self._token)
        process.stdin.write(msgspec.json.encode(startup) + b"\n")
        return process

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        mailbox: Mailbox,
        choice: int,
        salt: str | None = None,
        grammar: bytes | None = None,
        owner: str = "",
        adapter: str | None = None,
    ) -> int:
        """Hand a request to the engine; its tokens come to the mailbox as those of this choice."""
        self._next_id += 1
        order = Submit(self._next_id, prompt, params, salt, grammar, owner, adapter)
        self._pending[order.id] = Pending(mailbox, choice, order)
        self._send(order)
        return order.id

    def cancel(self, id: int) -> None:
        """End a request and free its blocks. One that has ended already is left alone."""
        if self._successor is not None:
            self._successor.cancel(id)
        elif self._leave(id) is not None:
            self._send(Cancel(id))

    async def trace(self, steps: int, within_s: float) -> StepTraces | None:
        """The next steps, or as many as there were in this time. None if this engine cannot be traced."""
        if self._traced is not None:
            raise ApiError(409, "Another trace is being taken.", "trace_runs", headers={"retry-after": "10"})
        self._next_id += 1
        id, told = self._next_id, asyncio.get_running_loop().create_future()
        self._traced = id, told
        self._send(TraceAsked(id, steps))
        try:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(told), within_s)
            self._send(EndTrace(id))
            return await asyncio.wait_for(asyncio.shield(told), _TRACE_TOLD_WITHIN_S)
        except TimeoutError:
            raise ApiError(503, "The engine did not tell its trace.", "trace_lost") from None
        except asyncio.CancelledError:
            self._send(EndTrace(id))
            raise
        finally:
            self._traced = None

    def _leave(self, id: int) -> Mailbox | None:
        """Where its tokens went, if it was still here."""
        request = self._pending.pop(id, None)
        if request is None:
            return None
        self.pace.one_ended()
        return request.mailbox

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter, or, without a folder, unload it. ApiError says why it cannot be."""
        self._next_id += 1
        settled = self._unsettled[self._next_id] = asyncio.get_running_loop().create_future()
        self._send(ChangeAdapter(self._next_id, name, folder))
        await settled

    def reset_prefixes(self) -> None:
        """Requests that come later find none of what was cached before, but for what running ones use."""
        self._send(ResetPrefixes())

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return len(self._pending)

    def close_mailboxes(self, error: ApiError) -> None:
        for request in self._pending.values():
            request.mailbox.close(error)
        for id in list(self._unsettled):
            self._settle(id, error)

    def succeed(self, dead: EngineClient, error: ApiError) -> int:
        """Take over the requests of a dead engine that told nothing of their answers. The others hear the error.

        So does what has seen two engines die: it may be the cause. Returns how many run again.
        """
        for number, request in dead._pending.items():
            if not request.mailbox.begun and request.lives < _MOST_LIVES:
                request.lives += 1
                self._pending[number] = request
        for number in self._pending:
            del dead._pending[number]
        dead.close_mailboxes(error)
        self._next_id, dead._successor = dead._next_id, self
        return len(self._pending)

    def run_again(self) -> None:
        """Hand what was taken over to the engine, once it has started."""
        for request in self._pending.values():
            self._send(request.order)

    def _settle(self, id: int, error: ApiError | None = None) -> None:
        """Who waits for it, if someone still does, hears that it is done, or why it is not."""
        settled = self._unsettled.pop(id, None)
        if settled is not None and not settled.done():
            settled.set_result(None) if error is None else settled.set_exception(error)

    def _send(self, order: Order) -> None:
        if self._orders is not None:
            self._orders.send(encode(order))

    def _hear(self) -> None:
        """Not where the next turn's is due already: two in one turn would fill a mailbox."""
        if self._receiving is None:
            self._receive()

    def _receive(self) -> None:
        """Reports that wait already are taken together, so that streams write many tokens at once when behind.

        They have their turns in between: in time, and before a mailbox is full.
        """
        self._receiving = None
        until, room = time.monotonic() + _RECEIVE_SLICE_S, MOST_UNREAD // 4
        while room > 0 and time.monotonic() < until:
            frames = self._reports.receive(0)
            if frames is None:
                return
            report = decode_report(frames[0])
            self._take(report)
            room -= len(report.tokens) if isinstance(report, Stepped) else 0
        self._receiving = asyncio.get_running_loop().call_soon(self._receive)

    def _take(self, report: EngineReport) -> None:
        if isinstance(report, Stepped):
            self.books = report.books
            self._deliver(report)
            self._on_step(report)
        elif isinstance(report, Pulses):
            now = time.monotonic()
            self._beats |= {beat.rank: (beat, now) for beat in report.beats}
        elif isinstance(report, Refused):
            refusal = ApiError.of(RequestError(report.code, report.found, report.fix))
            self._settle(report.id, refusal)
            mailbox = self._leave(report.id)
            if mailbox is not None:
                mailbox.close(refusal)
        elif isinstance(report, Settled):
            self._settle(report.id)
        elif isinstance(report, Loading):
            self.loading = report
        elif isinstance(report, Started):
            self.started = report
            if not self._ready.done():  # nobody waits for it any more if the start was given up
                self._ready.set_result(report)
        elif isinstance(report, Traced) and self._traced is not None and self._traced[0] == report.id:
            self._traced[1].set_result(report.traces)

    def _deliver(self, report: Stepped) -> None:
        for token in report.tokens:
            request = self._pending.get(token.id)
            if request is None:
                continue
            if token.finish_reason is not None:
                self._leave(token.id)
            if not request.mailbox.put(request.choice, token):
                self.cancel(token.id)

    def ranks(self) -> list[RankHealth]:
        """The health of every rank.

        A rank is stuck if it is silent, or too long in one step, while requests run, or if a hang has its name.
        """
        named = self.hang.ranks if self.hang is not None and self.hang.certain else []
        now = time.monotonic()
        nodes = self.started.nodes if self.started is not None else []
        healths = []
        for rank, (beat, heard) in sorted(self._beats.items()):
            age = now - heard
            busy = beat.busy_s + age if beat.busy_s else 0.0
            late = age > SILENT_AFTER_S or busy > self.launch.step_timeout_s / 2 or rank in named
            stuck = bool(self.live) and late
            node = nodes[rank] if nodes else gethostname()
            healths.append(RankHealth(rank, node, beat.step, round(age, 3), round(busy, 3), stuck))
        return healths

    def totals(self) -> dict[int, tuple[Totals, float]]:
        """What each rank has done so far, and when it said so."""
        return {rank: (beat.totals, heard) for rank, (beat, heard) in sorted(self._beats.items())}

    async def death(self) -> EngineDeadError:
        """Wait until the engine ends; one that hangs is ended. The mailboxes stay open until someone closes them.

        It hangs if two looks in a row say so: after a pause of this process, the first sees signs of life unread.
        """
        exited = asyncio.create_task(self._process.wait())
        hung = False
        while not exited.done():
            await asyncio.wait({exited}, timeout=_LOOK_EVERY_S)
            await self._look()
            verdict = self._hanging()
            if verdict is not None and hung and self._verdict is None:
                words = await self._watch.last_words(self._is_here)
                self._verdict = msgspec.structs.replace(verdict, found=f"{verdict.found} {words}".strip())
                self._kill()
            hung = verdict is not None
        return await self._death()

    async def _look(self) -> None:
        silent = {rank.rank for rank in self.ranks() if rank.silent}
        await self._watch.look({rank: beat.where for rank, (beat, _) in self._beats.items()}, silent, self._is_here)

    @property
    def _is_here(self) -> bool:
        """Whether all ranks are processes of this machine."""
        return self.started is not None and not self.started.nodes

    def _hanging(self) -> Death | None:
        limit = self.launch.step_timeout_s
        patience = min(GIVEN_UP_AFTER_S, limit)
        hanging = [rank for rank in self.ranks() if rank.stuck and (rank.beat_age_s > patience or rank.busy_s > limit)]
        if not hanging:
            if self.hang is None or not self.hang.certain or self._watch.still_s < patience:
                return None
            return Death("rank_stuck", f"No rank has moved for {self._watch.still_s:.0f} s.", self.hang.fix)
        silent = max(hanging, key=lambda rank: rank.beat_age_s)
        if silent.beat_age_s > patience:
            found = f"Rank {silent.rank} gave no sign of life for {silent.beat_age_s:.0f} s, in step {silent.step}."
            fix = "Its process was stopped, or its machine hangs: look at dmesg there."
        else:
            names = ", ".join(str(rank.rank) for rank in hanging)
            found = f"Step {silent.step} has not ended in {silent.busy_s:.0f} s on rank {names}."
            fix = "A rank waits for another or a kernel hangs; if steps are that slow here, raise --step-timeout."
        return Death("rank_stuck", found, fix)

    async def _death(self) -> EngineDeadError:
        status = await self._process.wait()
        cause = self._verdict
        path = death_file(self._folder)
        if cause is None and path.exists():
            cause = msgspec.json.decode(path.read_bytes(), type=Death)
        if cause is None:
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            cause = Death(
                "engine_died", f"The engine process {how} without a report.", fix_of(status) or "See its log."
            )
        return EngineDeadError(cause.code, cause.found, cause.fix)

    async def stop(self) -> None:
        """End the process and all its ranks, and clean up behind them. There is nothing left to cancel then."""
        self._pending.clear()
        try:
            if hasattr(self, "_spawning"):
                await self._end()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self) -> None:
        """A start that was broken off makes its process all the same."""
        self._process = await self._spawning
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_WAIT_S)
        self._kill()
        await self._process.wait()
        asyncio.get_running_loop().remove_reader(self._reports)
        if self._receiving is not None:
            self._receiving.cancel()
        self._context.destroy(linger=0)

    def _kill(self) -> None:
        """The engine and its ranks are one process group; whoever of it is left ends here."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
