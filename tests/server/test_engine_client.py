"""The API process's side of an engine process: starts, deaths and their causes, tokens by mailbox, signs of life."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.engine.core import Totals
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Beat
from phalanx.errors import EngineDeadError
from phalanx.runtime.config import EngineConfig
from phalanx.server import engine_client, mailbox
from phalanx.server.engine_client import EngineClient, EngineLaunch
from phalanx.server.errors import ApiError
from phalanx.server.mailbox import Mailbox
from phalanx.server.messages import Books, Cancel, Death, Loading, NewToken, Pulses, Refused, Stepped, Submit, encode

STUB = """
import os, signal, sys, time
from pathlib import Path
import msgspec, zmq
from phalanx.engine.core import Totals
from phalanx.engine.step_plan import Beat
from phalanx.runtime.channel import Receiver, Sender
from phalanx.server.messages import *

startup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Startup)
folder, how = Path(startup.folder), startup.config.model
context = zmq.Context()
orders = Receiver(context, orders_address(folder), startup.token)
reports = Sender(context, reports_address(folder), startup.token)
Sender(context, reports_address(folder), "not the token").send(encode(Loading(6, 6)))
reports.send(encode(Loading(1, 2)))
if how == "exits":
    sys.exit(3)
if how == "leaves a cause":
    death_file(folder).write_bytes(msgspec.json.encode(Death("no_room", "It is full.", "Make room.")))
    os._exit(1)
reports.send(encode(Started(100, 64, 4, 8, 16, [])))
if how.startswith("floods"):
    order = decode_order(orders.receive()[0])
    books, at_once = Books(1, 0, 8, 0, 0, 0, Totals()), int(how.split()[1])
    for first in range(0, 6000, at_once):
        ends = {5999: "length"}
        tokens = [NewToken(order.id, at, ends.get(at), 0, 0.0) for at in range(first, first + at_once)]
        reports.send(encode(Stepped(tokens, books)))
if how == "goes silent":
    reports.send(encode(Pulses([Beat(0, 7, 0.0)])))
if how == "ignores everything":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
sys.stdin.buffer.read()
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineClient]:
    """Clients of an engine process that only pretends."""
    (tmp_path / "stub_engine.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(engine_client, "_STOP_WAIT_S", 0.2)

    def make(how: str = "runs", step_timeout_s: float = 300.0) -> EngineClient:
        return EngineClient(EngineLaunch(EngineConfig(model=how), step_timeout_s, "stub_engine"), lambda report: None)

    return make


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("exits", "engine_died", "exited with status 3"), ("leaves a cause", "no_room", "It is full. Make room.")],
)
def test_an_engine_that_does_not_start_says_why(
    engine: Callable[..., EngineClient], how: str, code: str, words: str
) -> None:
    client = engine(how)

    async def run() -> None:
        try:
            with pytest.raises(EngineDeadError, match=words) as caught:
                await client.start()
            assert caught.value.code == code
        finally:
            await client.stop()

    asyncio.run(run())
    assert not client._folder.exists()


def test_a_killed_engine_is_told_by_its_signal(engine: Callable[..., EngineClient]) -> None:
    async def run() -> None:
        client = engine()
        try:
            started = await client.start()
            assert (started.vocab, started.max_num_seqs) == (100, 4)
            assert client.started == started
            assert client.loading == Loading(1, 2)
            client._process.kill()
            death = await client.death()
            assert death.code == "engine_died"
            assert "killed by signal 9" in str(death)
            assert "out-of-memory" in str(death)
        finally:
            await client.stop()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["runs", "ignores everything"])
def test_stop_ends_the_process_and_leaves_no_folder(engine: Callable[..., EngineClient], how: str) -> None:
    async def run() -> None:
        client = engine(how)
        await client.start()
        assert client._folder.stat().st_mode & 0o777 == 0o700
        await client.stop()
        assert client._process.returncode is not None
        assert not client._folder.exists()

    asyncio.run(run())


def test_a_start_broken_off_while_the_process_is_made_leaves_none(
    engine: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[asyncio.subprocess.Process] = []
    make = asyncio.create_subprocess_exec

    async def make_slowly(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        made.append(await make(*words, **options))
        await asyncio.sleep(0.1)
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", make_slowly)

    async def run() -> None:
        client = engine("ignores everything")
        starting = asyncio.create_task(client.start())
        while not made:
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await client.stop()
        assert made[0].returncode is not None
        assert not client._folder.exists()

    asyncio.run(run())


def test_a_handler_that_comes_after_the_end_finds_nothing_to_cancel(engine: Callable[..., EngineClient]) -> None:
    """One that was held up by a client who does not read. The sockets are gone by then, the cause is told."""
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        client = engine()
        await client.start()
        id = client.submit([1], SamplingParams(), Mailbox(), 0)
        await client.stop()
        client.cancel(id)
        assert client.live == 0
        gc.collect()

    asyncio.run(run())
    assert not complaints


@pytest.mark.parametrize("at_once", [1, 60])
def test_a_backlog_of_reports_does_not_fill_the_mailbox_of_one_who_reads(
    engine: Callable[..., EngineClient], at_once: int
) -> None:
    """This process may be held up for a while; the reader gets its turns between the reports that have piled up."""

    async def read(box: Mailbox) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < 6000:
            tokens += [token.token for _, token in await box.take()]
        return tokens

    async def run() -> list[int]:
        client = engine(f"floods {at_once}")
        try:
            await client.start()
            box = Mailbox()
            reading = asyncio.create_task(read(box))
            await asyncio.sleep(0)
            client.submit([1], SamplingParams(), box, 0)
            time.sleep(1)
            return await reading
        finally:
            await client.stop()

    assert mailbox.MOST_UNREAD < 6000
    assert asyncio.run(run()) == list(range(6000))


def test_no_turn_of_the_loop_has_two_turns_of_reports(engine: Callable[..., EngineClient]) -> None:
    """Where the next one is due already, what has come meanwhile waits for it."""

    class Reports:
        taken = 0

        def receive(self, timeout_ms: int) -> list[bytes]:
            self.taken += 1
            tokens = [NewToken(1, token, None, 0, 0.0) for token in range(mailbox.MOST_UNREAD)]
            return [encode(Stepped(tokens, Books(1, 0, 8, 0, 0, 0, Totals())))]

    async def run() -> None:
        client, reports = engine(), Reports()
        client._reports = reports  # type: ignore[assignment]
        client._hear()
        client._hear()
        assert reports.taken == 1
        await asyncio.sleep(0)
        assert reports.taken == 2
        assert client._receiving is not None
        client._receiving.cancel()
        await client.stop()

    asyncio.run(run())


def test_a_silent_rank_is_given_up_by_name(
    engine: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "SILENT_AFTER_S", 0.05)
    monkeypatch.setattr(engine_client, "_LOOK_EVERY_S", 0.05)

    async def run() -> None:
        client = engine("goes silent", step_timeout_s=0.2)
        try:
            await client.start()
            client.submit([1], SamplingParams(), Mailbox(), 0)
            async with asyncio.timeout(60):
                death = await client.death()
            assert death.code == "rank_stuck"
            assert "Rank 0 gave no sign of life" in str(death)
            assert "in step 7" in str(death)
        finally:
            await client.stop()

    asyncio.run(run())


class Alone(EngineClient):
    """A client with no engine behind it; what it would send is kept."""

    def __init__(self, step_timeout_s: float = 300.0) -> None:
        self.steps: list[Stepped] = []
        super().__init__(EngineLaunch(EngineConfig(), step_timeout_s, "none"), self.steps.append)
        self._folder.rmdir()
        self.sent: list[Any] = []

    def _send(self, order: Any) -> None:
        self.sent.append(order)


BOOKS = Books(1, 0, 5, 0, 0, 0, Totals())


def stepped(*tokens: tuple[int, int, str | None]) -> Stepped:
    return Stepped([NewToken(id, token, finish, 0, 0.0) for id, token, finish in tokens], BOOKS)


def taken(box: Mailbox) -> list[tuple[int, int]]:
    return [(choice, token.token) for choice, token in asyncio.run(box.take())]


def test_tokens_go_to_the_mailbox_and_choice_they_are_for_until_the_last() -> None:
    client, one, two = Alone(), Mailbox(), Mailbox()
    first, second, third = (
        client.submit([1], SamplingParams(), box, choice) for box, choice in [(one, 0), (one, 1), (two, 0)]
    )
    assert [type(order) for order in client.sent] == [Submit] * 3
    assert client.live == 3
    client._take(stepped((first, 10, None), (third, 30, None), (second, 20, "length")))
    assert client.live == 2
    client._take(stepped((first, 11, "stop"), (second, 21, None), (99, 1, None)))
    assert taken(one) == [(0, 10), (1, 20), (0, 11)]
    assert taken(two) == [(0, 30)]
    assert client.books == BOOKS
    assert len(client.steps) == 2


def test_a_cancel_is_sent_once_and_only_for_what_runs() -> None:
    client = Alone()
    one, two = (client.submit([1], SamplingParams(), Mailbox(), 0) for _ in range(2))
    client._take(stepped((two, 5, "stop")))
    for id in (one, one, two, 99):
        client.cancel(id)
    assert client.sent[2:] == [Cancel(one)]
    assert client.live == 0


def test_what_nobody_will_read_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MOST_UNREAD", 2)
    client, box = Alone(), Mailbox()
    id = client.submit([1], SamplingParams(), box, 0)
    client._take(stepped((id, 1, None), (id, 2, None)))
    assert client.live == 1
    client._take(stepped((id, 3, None)))
    assert client.live == 0
    assert client.sent[1:] == [Cancel(id)]


def test_a_refusal_ends_its_request_with_the_reason() -> None:
    client, box = Alone(), Mailbox()
    id = client.submit([1], SamplingParams(), box, 0)
    client._take(Refused(id, "too_long", "It is too long.", "Make it short."))
    client._take(Refused(99, "too_long", "", ""))
    assert client.live == 0
    with pytest.raises(ApiError, match=r"It is too long\. Make it short") as caught:
        asyncio.run(box.take())
    assert caught.value.status_code == 400


def test_closing_the_mailboxes_tells_every_request() -> None:
    client, boxes = Alone(), [Mailbox(), Mailbox()]
    for box in boxes:
        client.submit([1], SamplingParams(), box, 0)
    client.close_mailboxes(ApiError(500, "Gone.", "gone"))
    for box in boxes:
        with pytest.raises(ApiError, match="Gone"):
            asyncio.run(box.take())


def test_the_next_engine_runs_what_had_no_token_and_once_only() -> None:
    first, second, third = Alone(), Alone(), Alone()
    begun, silent, left = Mailbox(), Mailbox(), Mailbox()
    gone = ApiError(500, "Gone.", "rank_died")
    answered, _ = first.submit([1], SamplingParams(), begun, 0), first.submit([2], SamplingParams(), begun, 1)
    kept, cancelled = first.submit([3], SamplingParams(), silent, 0), first.submit([4], SamplingParams(), left, 0)
    first._take(stepped((answered, 1, None)))
    assert second.succeed(first, gone) == 2
    with pytest.raises(ApiError, match="Gone"):
        asyncio.run(begun.take()) and asyncio.run(begun.take())
    first.cancel(cancelled)
    second.sent.clear()
    second.run_again()
    assert [order.prompt for order in second.sent] == [[3]]
    assert second.submit([5], SamplingParams(), Mailbox(), 0) > cancelled
    assert third.succeed(second, gone) == 1
    first.cancel(kept)
    with pytest.raises(ApiError, match="Gone"):
        asyncio.run(silent.take())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_client, "time", clock)
    return clock


def test_a_rank_is_stuck_if_it_is_silent_while_requests_run(clock: Clock) -> None:
    client = Alone()
    client._take(Pulses([Beat(1, 3, 0.0), Beat(0, 3, 0.5)]))
    clock.now += 4
    assert [(rank.rank, rank.step, rank.beat_age_s, rank.busy_s) for rank in client.ranks()] == [
        (0, 3, 4, 4.5),
        (1, 3, 4, 0),
    ]
    client._take(Pulses([Beat(0, 4, 0.5)]))
    clock.now += 2
    assert not any(rank.stuck for rank in client.ranks())
    client.submit([1], SamplingParams(), Mailbox(), 0)
    assert [rank.stuck for rank in client.ranks()] == [False, True]


def test_what_a_rank_has_done_is_told_with_when_it_said_so(clock: Clock) -> None:
    client = Alone()
    client._take(Pulses([Beat(1, 3, 0.0, Totals(steps=3)), Beat(0, 3, 0.5, Totals(steps=2))]))
    before = clock.now
    clock.now += 1
    client._take(Pulses([Beat(1, 4, 0.0, Totals(steps=4))]))
    assert list(client.totals().items()) == [(0, (Totals(steps=2), before)), (1, (Totals(steps=4), clock.now))]


def test_a_rank_is_stuck_if_it_beats_but_its_step_takes_too_long(clock: Clock) -> None:
    client = Alone(step_timeout_s=60)
    client.submit([1], SamplingParams(), Mailbox(), 0)
    for busy, stuck, hanging in [(29.0, False, False), (31.0, True, False), (61.0, True, True)]:
        client._take(Pulses([Beat(0, 3, busy), Beat(1, 3, busy)]))
        assert [rank.stuck for rank in client.ranks()] == [stuck] * 2
        assert (client._hanging() is not None) is hanging
    verdict = client._hanging()
    assert verdict is not None
    assert "Step 3 has not ended in 61 s on rank 0, 1" in verdict.found


def test_after_a_pause_of_this_process_a_live_engine_is_not_given_up(
    engine: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life that came meanwhile are still unread when it wakes up."""
    monkeypatch.setattr(engine_client, "_LOOK_EVERY_S", 0.05)

    async def run() -> None:
        client = engine()
        try:
            await client.start()
            client.submit([1], SamplingParams(), Mailbox(), 0)
            client._beats = {0: (Beat(0, 1, 0.0), time.monotonic() - 100)}
            look, verdicts = client._hanging, list[Death | None]()

            def look_and_then_read() -> Death | None:
                verdicts.append(look())
                client._take(Pulses([Beat(0, 1, 0.0)]))
                return verdicts[-1]

            monkeypatch.setattr(client, "_hanging", look_and_then_read)
            dying = asyncio.create_task(client.death())
            while len(verdicts) < 3 and not dying.done():
                await asyncio.sleep(0.01)
            assert not dying.done()
            assert [verdict is not None for verdict in verdicts[:3]] == [True, False, False]
            dying.cancel()
        finally:
            await client.stop()

    asyncio.run(run())
