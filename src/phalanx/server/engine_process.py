"""The engine process: scheduler and rank 0, fed by the API process, which started it and which it does not outlive."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from phalanx.engine.core import Engine
from phalanx.engine.marks import StepTraces
from phalanx.engine.request import Matcher, Request
from phalanx.engine.speculation import SpeculationTotals
from phalanx.engine.tracing import EngineTracer
from phalanx.errors import AdapterError, ConfigError, PhalanxError
from phalanx.runtime.channel import Receiver, Sender
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.cores import keep_to_own_cores
from phalanx.runtime.pulse import Pulse, every_beat
from phalanx.runtime.rank import device_name
from phalanx.runtime.stacks import tell_stacks
from phalanx.runtime.start import start_engine
from phalanx.server.grammar.engine_thread import GrammarThread, read_tokenizer
from phalanx.server.messages import (
    Books,
    Cancel,
    ChangeAdapter,
    Death,
    EndTrace,
    EngineReport,
    Loading,
    NewToken,
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
    decode_order,
    encode,
    orders_address,
    reports_address,
)
from phalanx.weights.checkpoint import locate
from phalanx.weights.load import Progress

if TYPE_CHECKING:
    from phalanx.text.tokenizer import Tokenizer

StartEngine = Callable[[EngineConfig, Path, Progress], Engine]

_LOADING_STEPS = 50
_LAST_WORDS_BYTES = 64 * 1024
_MOST_TOLD = 8 * 1024
_DYING = threading.Lock()
_GRAMMAR_POLL_MS = 5


def main(start: StartEngine = start_engine) -> None:
    """Read the start-up line, load, serve until the other end of standard input closes.

    Signals that stop a whole service are for the API process: this one and its ranks are needed until it has drained.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    startup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Startup)
    context, folder = zmq.Context(), Path(startup.folder)
    tempfile.tempdir = startup.folder
    _reserve_last_words(folder)
    tell_stacks(folder, 0)
    threading.Thread(target=_end_with_parent, args=[folder], daemon=True).start()
    orders = Receiver(context, orders_address(folder), startup.token)
    reports = Sender(context, reports_address(folder), startup.token)
    try:
        path = locate(startup.config.model)
        tokenizer = None
        if startup.config.warm_up != "off":
            tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer").submit(read_tokenizer, path)
        engine = start(startup.config, path, _telling(reports))
        pulses = Sender(context, reports_address(folder), startup.token)
        die = partial(_die, folder)
        EngineLoop(engine, path, device_name(startup.config), orders, reports, pulses, die, tokenizer).run()
    except BaseException as error:
        _die(folder, error)


def _die(folder: Path, error: BaseException) -> None:
    """At once, whatever other threads wait for: a collective whose peer is gone would take minutes to end."""
    cause = _cause(error)
    with _DYING:
        try:
            with _last_words(folder).open("r+b") as file:
                file.write(msgspec.json.encode(cause)[:_LAST_WORDS_BYTES])
                file.truncate()
            _last_words(folder).rename(death_file(folder))
        except OSError:
            print(f"{cause.code}: {cause.found}", file=sys.stderr, flush=True)
        os._exit(1)


def _last_words(folder: Path) -> Path:
    return folder / "last-words"


def _reserve_last_words(folder: Path) -> None:
    """Room for the cause of a death, for the disk may be full by then: perhaps that is the cause."""
    with _last_words(folder).open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, _LAST_WORDS_BYTES)


def _end_with_parent(folder: Path) -> None:
    """Nobody else may be left to remove the folder, and what the ranks keep in it."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _telling(reports: Sender) -> Progress:
    """Progress of loading, told in steps of a few percent."""
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        part = done * _LOADING_STEPS // max(total, 1)
        if part != told:
            told = part
            reports.send(encode(Loading(done, total)))

    return tell


def _cause(error: BaseException) -> Death:
    if isinstance(error, PhalanxError):
        return Death(error.code, error.found, error.fix)
    trace = "".join(traceback.format_exception(error))
    found = f"The engine raised {type(error).__name__}: {error}\n{trace}"
    return Death("engine_failed", found[:_MOST_TOLD], "This is a bug.")


class EngineLoop:
    """Takes orders between steps, reports every step's tokens in one message."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        device: str,
        orders: Receiver,
        reports: Sender,
        pulses: Sender,
        die: Callable[[BaseException], None],
        tokenizer: Future[Tokenizer] | None = None,
    ) -> None:
        self.engine = engine
        self._die = die
        self._grammars = GrammarThread(path, engine, tokenizer)
        self._orders = orders
        self._reports = reports
        self._pulses = pulses
        self._pulse = Pulse(0, engine.totals, engine.runner.where)
        self._device = device
        self._ids: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._broken: list[tuple[int, PhalanxError]] = []
        """Answers that end with a reason, which is told behind their tokens."""
        self._traced: tuple[int, EngineTracer] | None = None

    def run(self) -> None:
        """For ever. What has been made so far will live as long: the garbage collector need not look at it again."""
        self._grammars.warm_up()
        gc.collect()
        gc.freeze()
        self._tell(self._started())
        every_beat(self._beat)
        if self._device == "cpu":
            keep_to_own_cores()
        while True:
            self._take_orders()
            if self.engine.has_work:
                tokens = self._step()
                if tokens and self._keeps_waiting:
                    self._take_orders()
                    tokens += self._step()
                self._tell(Stepped(tokens, self._books()))
                while self._broken:
                    self._refuse(*self._broken.pop(0))

    @property
    def _keeps_waiting(self) -> bool:
        """Whether a GPU has nothing to do, though there is work: its next step is launched before its tokens are told.
        A CPU would compute that step first.
        """
        return self.engine.has_work and not self.engine.scheduler.in_flight and self.engine.runner.depth > 1

    def _beat(self) -> None:
        """From a thread of its own: the loop may be waiting for a rank that is gone."""
        try:
            beats = self.engine.runner.beats()
        except PhalanxError as error:
            self._die(error)
            return
        self._pulses.send(encode(Pulses([self._pulse.beat(), *beats])))

    def _tell(self, report: EngineReport) -> None:
        self._reports.send(encode(report))

    def _take_orders(self) -> None:
        """All orders that have come, and those whose grammar is ready.

        If there is nothing to run, do a piece of what was put off until now; if nothing was, wait for an order.
        """
        frames = self._orders.receive(0)
        if frames is None and not self.engine.has_work:
            idle_wait = _GRAMMAR_POLL_MS if self._grammars.busy else None
            frames = self._orders.receive(0 if self.engine.runner.tend() else idle_wait)
        while frames is not None:
            self._take(decode_order(frames[0]))
            frames = self._orders.receive(0)
        for order, matcher in self._grammars.ready():
            self._add(order, matcher)

    def _take(self, order: Order) -> None:
        if isinstance(order, Submit):
            if order.grammar is not None:
                self._grammars.compile(order)
            else:
                self._add(order, None)
        elif isinstance(order, ResetPrefixes):
            self.engine.scheduler.pool.forget_idle()
            self._tell(Stepped([], self._books()))
        elif isinstance(order, ChangeAdapter):
            self._change_adapter(order)
        elif isinstance(order, TraceAsked):
            self._trace(order)
        elif isinstance(order, EndTrace):
            if self._traced is not None and self._traced[0] == order.id:
                self._tell_trace(order.id, self._traced[1].end())
        else:
            self._cancel(order)

    def _cancel(self, order: Cancel) -> None:
        if order.id in self._requests:
            request = self._forget(order.id)
            self.engine.cancel(request.id)
            self._tell(Stepped([], self._books()))
        else:
            self._grammars.drop(order.id)

    def _trace(self, order: TraceAsked) -> None:
        """One at a time: a trace that is not over ends here."""
        if self._traced is not None:
            self._tell_trace(self._traced[0], self._traced[1].end())
        try:
            tracer = EngineTracer(self.engine, order.steps, lambda traces: self._tell_trace(order.id, traces))
            self._traced = order.id, tracer
        except ConfigError:
            self._tell_trace(order.id, None)

    def _tell_trace(self, id: int, traces: StepTraces | None) -> None:
        self._traced = None
        self._tell(Traced(id, traces))

    def _change_adapter(self, order: ChangeAdapter) -> None:
        try:
            if order.folder is None:
                self.engine.unload_adapter(order.name)
            else:
                self.engine.load_adapter(order.name, Path(order.folder))
        except AdapterError as error:
            self._refuse(order.id, error)
            return
        self._tell(Settled(order.id))

    def _add(self, order: Submit, matcher: Matcher | PhalanxError | None) -> None:
        try:
            if isinstance(matcher, PhalanxError):
                raise matcher
            request = self.engine.add(order.prompt, order.params, order.salt, matcher, order.owner, order.adapter)
        except PhalanxError as error:
            self._refuse(order.id, error)
            return
        self._ids[request.id] = order.id
        self._requests[order.id] = request

    def _refuse(self, id: int, error: PhalanxError) -> None:
        self._tell(Refused(id, error.code, error.found, error.fix))

    def _forget(self, id: int) -> Request:
        request = self._requests.pop(id)
        del self._ids[request.id]
        return request

    def _step(self) -> list[NewToken]:
        """The tokens of a step. An answer that its grammar can no longer follow ends with the reason."""
        tokens = []
        with self._pulse.step(self.engine.totals.steps + 1):
            outputs = self.engine.step()
        for output in outputs:
            id = self._ids[output.request_id]
            request = self._forget(id) if output.finish_reason is not None else self._requests[id]
            if request.error is not None and output.finish_reason is not None:
                self._broken.append((id, request.error))
                continue
            tokens.append(
                NewToken(
                    id,
                    output.token,
                    output.finish_reason,
                    output.cached_tokens,
                    output.queued_s,
                    output.logprobs,
                    output.prompt_logprobs,
                    output.embedding,
                    output.drafted,
                )
            )
        return tokens

    def _started(self) -> Started:
        scheduler = self.engine.scheduler
        return Started(
            vocab=self.engine.vocab,
            max_model_len=scheduler.limits.max_model_len,
            max_num_seqs=scheduler.limits.max_num_seqs,
            num_blocks=scheduler.pool.num_blocks,
            block_size=scheduler.pool.block_size,
            stop_tokens=sorted(scheduler.eos_token_ids),
            device=self._device,
            nodes=self.engine.runner.nodes,
        )

    def _books(self) -> Books:
        scheduler = self.engine.scheduler
        return Books(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.available,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            totals=self.engine.totals,
            idle_blocks=scheduler.pool.idle,
            speculation=scheduler.speculation.totals if scheduler.speculation else SpeculationTotals(),
        )


if __name__ == "__main__":
    main()
