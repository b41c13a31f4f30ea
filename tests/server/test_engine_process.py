"""The engine process: orders between steps, every step's tokens in one report, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from phalanx.bench.forced import AllDrafts
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import Beat, StepPlan, StepResult
from phalanx.errors import ConfigError, EngineDeadError, RequestError, StepMemoryError
from phalanx.runtime.config import EngineConfig
from phalanx.server import engine_process
from phalanx.server.engine_client import EngineClient, EngineLaunch
from phalanx.server.engine_process import EngineLoop
from phalanx.server.errors import ApiError
from phalanx.server.mailbox import Mailbox
from phalanx.server.messages import (
    Cancel,
    Death,
    EngineReport,
    Loading,
    Order,
    Pulses,
    Refused,
    ResetPrefixes,
    Started,
    Stepped,
    Submit,
    death_file,
    decode_report,
    encode,
)
from tests.engine.books import Guesser, ToyMatcher, greedy, make_engine


class Over(Exception):
    """There are no more orders, and nothing runs."""


class Orders:
    """Orders in the order given; `None` lets a step run first."""

    def __init__(self, *orders: Order | None) -> None:
        self._orders = deque(orders)

    def receive(self, timeout_ms: int | None = None) -> list[bytes] | None:
        if not self._orders and timeout_ms is None:
            raise Over
        order = self._orders.popleft() if self._orders else None
        assert order is not None or timeout_ms == 0, "it waits for orders while requests run"
        return None if order is None else [encode(order)]


class Told:
    def __init__(self) -> None:
        self.reports: list[EngineReport] = []

    def send(self, *frames: bytes) -> None:
        self.reports.append(decode_report(frames[0]))


def run(monkeypatch: pytest.MonkeyPatch, *orders: Order | None) -> tuple[list[EngineReport], list[EngineReport]]:
    """What an engine of 4 sequences and 8 blocks reports, and its signs of life: one beat is enough."""
    runner = ModelledRunner(price=lambda plan: 0.0, token=lambda slot, position: 40 + position)
    reports, pulses = Told(), Told()
    run_with(monkeypatch, runner, None, reports, pulses, *orders)
    return reports.reports, pulses.reports


def run_with(
    monkeypatch: pytest.MonkeyPatch,
    runner: ModelledRunner,
    speculation: Speculation | None,
    reports: Told,
    pulses: Told,
    *orders: Order | None,
) -> None:
    monkeypatch.setattr(engine_process, "every_beat", lambda tell: tell())
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: None)
    scheduler = Scheduler(Limits(4, 64, 64), BlockPool(8, 16, True), (2,), speculation=speculation)
    channels: Any = (Orders(*orders), reports, pulses, pytest.fail)
    with pytest.raises(Over):
        EngineLoop(Engine(scheduler, runner, vocab=100), Path(), "cpu", *channels).run()


def params(max_tokens: int = 2) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def tokens(reports: list[EngineReport]) -> list[list[tuple[int, int, str | None]]]:
    steps = [report for report in reports if isinstance(report, Stepped)]
    return [[(token.id, token.token, token.finish_reason) for token in step.tokens] for step in steps]


def test_it_says_its_sizes_first_and_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, pulses = run(monkeypatch)
    assert reports == [Started(100, 64, 4, 8, 16, [2])]
    (pulse,) = pulses
    assert isinstance(pulse, Pulses)
    assert [beat.rank for beat in pulse.beats] == [0]


def test_tokens_go_by_the_client_s_ids_a_step_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = run(monkeypatch, Submit(70, [5, 6, 7], params()), Submit(71, [5], params()))
    first_step, second_step = tokens(reports)
    assert sorted(first_step) == [(70, 43, None), (71, 41, None)]
    assert sorted(second_step) == [(70, 44, "length"), (71, 42, "length")]
    first, last = [report.books for report in reports if isinstance(report, Stepped)]
    assert (first.running, first.waiting, first.free_blocks) == (2, 0, 6)
    assert (last.running, last.waiting, last.free_blocks) == (0, 0, 8)
    assert last.totals.steps == 2


class Noted(ModelledRunner):
    """Whose launches and readings are `events`."""

    def __init__(self, depth: int, events: list[str]) -> None:
        super().__init__(lambda plan: 0.0, lambda slot, position: 40 + position, depth)
        self._events = events

    def launch(self, plan: StepPlan) -> None:
        self._events.append("launch")
        super().launch(plan)

    def collect(self) -> StepResult:
        self._events.append("read")
        return super().collect()


class NotedTold(Told):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def send(self, *frames: bytes) -> None:
        super().send(*frames)
        if isinstance(report := self.reports[-1], Stepped) and report.tokens:
            self._events.append("tell")


@pytest.mark.parametrize(
    ("depth", "drafts", "expected"),
    [
        (1, False, ["launch", "read", "tell"] * 4),
        (1, True, ["launch", "read", "tell"] * 2),
        (2, False, ["launch", "launch", "read", "tell", "launch", "read", "tell", "launch", *["read", "tell"] * 2]),
        (2, True, ["launch", "read", "launch", "tell", "read", "tell"]),
    ],
)
def test_tokens_are_told_when_a_gpu_has_its_next_step(
    monkeypatch: pytest.MonkeyPatch, depth: int, drafts: bool, expected: list[str]
) -> None:
    """One that has two steps on its way has it in any case, but for those with drafts, which are read first."""
    events: list[str] = []
    speculation, reports = AllDrafts(2, 1.0, by_ranks=False) if drafts else None, NotedTold(events)
    run_with(monkeypatch, Noted(depth, events), speculation, reports, Told(), Submit(7, [5], params(4)))
    assert events == expected
    assert [token.token for step in reports.reports if isinstance(step, Stepped) for token in step.tokens] == [
        *range(41, 45)
    ]


def test_a_request_that_comes_while_another_runs_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = run(monkeypatch, Submit(1, [5], params(3)), None, Submit(2, [5], params(1)), None)
    assert [{id for id, _, _ in step} for step in tokens(reports)] == [{1}, {1, 2}, {1}]


def test_a_cancel_frees_the_blocks_and_the_books_say_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = run(monkeypatch, Submit(1, [5], params(50)), None, Cancel(1), Cancel(1), Cancel(99))
    assert tokens(reports) == [[(1, 41, None)], []]
    last = reports[-1]
    assert isinstance(last, Stepped)
    assert (last.books.running, last.books.free_blocks) == (0, 8)


def test_a_cancel_of_what_has_ended_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = run(monkeypatch, Submit(1, [5], params(1)), None, Cancel(1))
    assert tokens(reports) == [[(1, 41, "length")]]


def test_what_cannot_be_run_is_refused_by_name_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = run(monkeypatch, Submit(1, [5] * 64, params()), Submit(2, [5], params(1)))
    refused = reports[1]
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (1, "prompt_too_long")
    assert tokens(reports) == [[(2, 41, "length")]]


def test_what_stands_ahead_of_an_error_is_told_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts bring several tokens at once, the last of which the grammar cannot follow."""
    monkeypatch.setattr(engine_process, "every_beat", lambda tell: tell())
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: None)
    told: list[list[EngineReport]] = []
    for speculation in (None, Speculation(Guesser(1.0), 4)):
        engine, runner = make_engine(speculation=speculation)
        for name in ("where", "beats", "tend", "nodes"):
            monkeypatch.setattr(runner, name, getattr(runner._inner, name), raising=False)
        if speculation is not None:
            monkeypatch.setattr(speculation, "_wants_plain", lambda requests: False)
        monkeypatch.setattr(engine, "add", partial(_add_with_toy, engine.add))
        reports = Told()
        channels: Any = (Orders(Submit(70, [1, 2, 3, 4, 5], greedy(30))), reports, Told(), pytest.fail)
        with pytest.raises(Over):
            EngineLoop(engine, Path(), "cpu", *channels).run()
        told.append(reports.reports)
    plain, drafted = (list(chain.from_iterable(tokens(reports))) for reports in told)
    assert len(tokens(told[1])) < len(tokens(told[0]))
    assert drafted == plain
    for reports in told:
        assert [report.id for report in reports if isinstance(report, Refused)] == [70]
        assert isinstance(reports[-1], Refused)


def _add_with_toy(
    add: Callable[..., Request], prompt: list[int], asked: SamplingParams, salt: str, *_: object
) -> Request:
    return add(prompt, asked, salt, ToyMatcher(30, fails_at=8))


def test_a_step_without_memory_refuses_its_youngest_request_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = ModelledRunner.launch

    def short(runner: ModelledRunner, plan: StepPlan) -> None:
        if plan.step == 2:
            raise StepMemoryError("out_of_memory", "GPU 0 of this secret machine is full.", "Lower a limit.")
        launch(runner, plan)

    monkeypatch.setattr(ModelledRunner, "launch", short)
    reports, _ = run(monkeypatch, Submit(1, [5], params(3)), Submit(2, [5], params(3)))
    (refused,) = [report for report in reports if isinstance(report, Refused)]
    assert (refused.id, refused.code) == (2, "out_of_memory")
    assert "secret" not in refused.found, "the operator hears what the client need not"
    assert ApiError.of(RequestError(refused.code, refused.found, refused.fix)).status_code == 503
    assert [token for step in tokens(reports) for token in step if token[0] == 1][-1] == (1, 43, "length")


def test_what_was_put_off_is_done_while_no_request_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, so that a request that comes meanwhile is heard, and never beside one that runs."""
    done: list[str] = []
    pieces = ["one", "two", "three"]
    launch = ModelledRunner.launch

    def tend(runner: ModelledRunner) -> bool:
        if pieces:
            done.append(pieces.pop(0))
        return bool(pieces)

    def launched(runner: ModelledRunner, plan: StepPlan) -> None:
        done.append("step")
        launch(runner, plan)

    monkeypatch.setattr(ModelledRunner, "tend", tend)
    monkeypatch.setattr(ModelledRunner, "launch", launched)
    run(monkeypatch, None, Submit(1, [5], params(3)))
    assert done == ["one", "step", "step", "step", "two", "three"]


def test_progress_is_told_in_steps_of_a_few_percent() -> None:
    told: Any = Told()
    tell = engine_process._telling(told)
    for done in range(0, 10_001):
        tell(done, 10_000)
    assert len(told.reports) == 51
    assert told.reports[0] == Loading(0, 10_000)
    assert told.reports[-1] == Loading(10_000, 10_000)
    engine_process._telling(told)(0, 0)


def test_a_cause_is_told_in_the_words_of_the_error_or_with_its_trace() -> None:
    known = engine_process._cause(ConfigError("too_big", "It is too big.", "Make it small."))
    assert (known.code, known.found, known.fix) == ("too_big", "It is too big.", "Make it small.")
    try:
        raise KeyError("oops")
    except KeyError as error:
        unknown = engine_process._cause(error)
    assert unknown.code == "engine_failed"
    assert "KeyError: 'oops'" in unknown.found
    assert "test_engine_process.py" in unknown.found


@pytest.mark.parametrize("room", ["reserved", "none"])
def test_the_cause_of_a_death_is_told_though_the_disk_is_full(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Room for it is set aside at the start; where there was none even then, it goes to the log."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_room(*_: object) -> None:
        raise full

    class Ended(Exception):
        pass

    def ended(status: int) -> None:
        assert status == 1
        raise Ended

    monkeypatch.setattr(engine_process.os, "_exit", ended)
    if room == "reserved":
        engine_process._reserve_last_words(tmp_path)
        assert engine_process._last_words(tmp_path).stat().st_size >= 64 * 1024
    monkeypatch.setattr(Path, "write_bytes", no_room)
    if room == "none":
        monkeypatch.setattr(Path, "open", no_room)
    with pytest.raises(Ended):
        engine_process._die(tmp_path, EngineDeadError("rank_died", "Rank 1 was killed by signal 9.", "See dmesg."))
    monkeypatch.undo()
    if room == "reserved":
        told = msgspec.json.decode(death_file(tmp_path).read_bytes(), type=Death)
        assert told == Death("rank_died", "Rank 1 was killed by signal 9.", "See dmesg.")
    else:
        assert "Rank 1 was killed by signal 9." in capfd.readouterr().err


def test_a_real_one_outlives_signals_but_not_its_parent_and_leaves_no_folder() -> None:
    """A service manager signals every process; the engine is needed until its parent has drained."""

    async def live() -> None:
        client = EngineClient(EngineLaunch(EngineConfig(), 300, "phalanx.bench.modelled_engine"), lambda report: None)
        try:
            await client.start()
            process = psutil.Process(client._process.pid)
            for signum in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(signum)
            box = Mailbox()
            client.submit([5, 6], params(3), box, 0)
            taken = []
            async with asyncio.timeout(60):
                while len(taken) < 3:
                    taken += await box.take()
            assert taken[-1][1].finish_reason == "length"
            assert client._process.stdin is not None
            client._process.stdin.close()
            assert await asyncio.wait_for(client._process.wait(), 60) == 0
            assert not client._folder.exists()
        finally:
            await client.stop()

    asyncio.run(live())


def test_a_rank_that_is_gone_ends_the_process_though_the_loop_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beat thread hears of it; the loop may be in a collective that never ends."""
    gone = EngineDeadError("node_lost", "Rank 1 on far gave no sign of life.", "Look there.")
    ends: list[BaseException] = []

    class Silent(ModelledRunner):
        def beats(self) -> list[Beat]:
            raise gone

    monkeypatch.setattr(engine_process, "every_beat", lambda tell: tell())
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: None)
    runner = Silent(price=lambda plan: 0.0)
    engine = Engine(Scheduler(Limits(4, 64, 64), BlockPool(8, 16, True), (2,)), runner, vocab=100)
    pulses = Told()
    channels: Any = (Orders(), Told(), pulses, ends.append)
    with pytest.raises(Over):
        EngineLoop(engine, Path(), "cpu", *channels).run()
    assert ends == [gone]
    assert pulses.reports == []


def test_a_reset_forgets_prefixes_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(3, 40))
    first, second = Submit(1, prompt, params()), Submit(2, prompt, params())
    for between, found in [((None, None), 32), ((None, None, ResetPrefixes()), 0)]:
        reports, _ = run(monkeypatch, first, *between, second)
        last = [report for report in reports if isinstance(report, Stepped)][-1]
        assert last.books.prefix_hits == found
