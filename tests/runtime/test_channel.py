"""Channels between machines: who has no key, or another key, or no token, is not heard."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import cast

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.engine.step_plan import Beat
from phalanx.runtime import watch
from phalanx.runtime.channel import Beacon, Context, Gate, Keys, Lookout, Receiver, Sender
from phalanx.runtime.links import Links
from phalanx.runtime.messages import RankReady, encode
from phalanx.runtime.pulse import BEAT_EVERY_S
from phalanx.runtime.watch import Watch
from tests.server.running import eventually

TOKEN = "token"
HERE = "tcp://127.0.0.1:*"
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_DISCONNECTED,
)
ENGINE, RANK, STRANGER = Keys.make(), Keys.make(), Keys.make()


@pytest.fixture
def near() -> Iterator[Context]:
    """The engine's context, which admits the rank's key."""
    context: Context = zmq.Context()
    context.linger = 0
    gate = Gate(context, [RANK.public])
    yield context
    gate.close()
    context.destroy(linger=0)


@pytest.fixture
def far() -> Iterator[Context]:
    context: Context = zmq.Context()
    context.linger = 0
    yield context
    context.destroy(linger=0)


def heard(receiver: Receiver, within_s: float = 20.0) -> list[bytes] | None:
    return receiver.receive(int(within_s * 1e3))


def test_a_known_key_with_the_token_is_heard(near: Context, far: Context) -> None:
    receiver = Receiver(near, HERE, TOKEN, ENGINE)
    sender = Sender(far, receiver.address, TOKEN, keys=RANK, peer=ENGINE.public)
    sender.send(b"hello")
    assert heard(receiver) == [b"hello"]


def lets_in(end: Receiver | Beacon, connect: Callable[[str], Sender | Lookout]) -> bool:
    """Whether this end takes the next one that connects to it: its socket tells."""
    monitor = end._socket.get_monitor_socket()
    caller = connect(end.address)
    while (event := recv_monitor_message(monitor)["event"]) not in (*REFUSED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        pass
    caller._socket.close()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize(
    ("keys", "peer", "admitted"),
    [(RANK, ENGINE, True), (STRANGER, ENGINE, False), (None, None, False), (RANK, STRANGER, False)],
    ids=["the rank", "a stranger's key", "no key", "a wrong idea of whom it talks to"],
)
def test_nobody_else_is_let_in(
    near: Context, far: Context, keys: Keys | None, peer: Keys | None, admitted: bool
) -> None:
    def connect(address: str) -> Sender:
        return Sender(far, address, TOKEN, keys=keys, peer=peer and peer.public)

    assert lets_in(Receiver(near, HERE, TOKEN, ENGINE), connect) is admitted


def test_a_message_without_the_token_is_dropped(near: Context, far: Context) -> None:
    """From one who may connect. What the same one sends behind it, with the token, shows that it had arrived."""
    receiver = Receiver(near, HERE, TOKEN, ENGINE)
    sender = Sender(far, receiver.address, "guess", keys=RANK, peer=ENGINE.public)
    sender.send(b"evil")
    sender._token = TOKEN.encode()
    sender.send(b"good")
    assert heard(receiver) == [b"good"]


def test_what_goes_over_the_network_cannot_be_read(near: Context) -> None:
    """A listener in the middle sees neither the token nor the words."""
    receiver = Receiver(near, HERE, "a-secret-token", ENGINE)
    port = int(receiver.address.rpartition(":")[2])
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def pump(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)

        def relay() -> None:
            client, _ = tap.accept()
            server = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=pump, args=[server, client], daemon=True).start()
            pump(client, server)

        threading.Thread(target=relay, daemon=True).start()
        context: Context = zmq.Context()
        address = f"tcp://127.0.0.1:{tap.getsockname()[1]}"
        sender = Sender(context, address, "a-secret-token", keys=RANK, peer=ENGINE.public)
        sender.send(b"a-secret-word")
        assert heard(receiver) == [b"a-secret-word"]
        context.destroy(linger=0)
    assert len(seen) > 200
    assert b"a-secret" not in seen


def test_a_beacon_is_seen_by_who_may_and_darkness_is_noticed(near: Context, far: Context) -> None:
    beacon = Beacon(near, HERE, TOKEN, ENGINE)
    lookout = Lookout(far, beacon.address, TOKEN, RANK, ENGINE.public)

    def flash_is_seen() -> bool:
        beacon.flash()
        return lookout.sees(100)

    assert eventually(flash_is_seen)
    while lookout.sees(200):
        pass
    assert not lets_in(beacon, lambda address: Lookout(far, address, TOKEN, STRANGER, ENGINE.public))


def test_orders_go_to_where_a_rank_says_it_takes_them(near: Context, far: Context) -> None:
    gate = Gate(far, [ENGINE.public])
    links = Links(near, HERE, HERE, TOKEN, ENGINE, {1: RANK.public})
    orders = Receiver(far, HERE, TOKEN, RANK)
    reports = Sender(far, links.reports.address, TOKEN, keys=RANK, peer=ENGINE.public)
    reports.send(encode(RankReady(1, orders.address)))
    assert links.receive(20_000) == RankReady(1, orders.address)
    links.send([b"plan"])
    assert heard(orders) == [b"plan"]
    gate.close()


def test_beats_are_heard_by_who_watches(near: Context, far: Context) -> None:
    links = Links(near, HERE, HERE, TOKEN, ENGINE, {1: RANK.public})
    rank = Sender(far, links.beats.address, TOKEN, keys=RANK, peer=ENGINE.public)
    watching = Watch(links, Beacon(near, HERE, TOKEN, ENGINE), [1])
    rank.send(encode(Beat(1, 3, 0.0)))
    assert eventually(lambda: watching.beats() == [Beat(1, 3, 0.0)])
    watching.close()


class Turns:
    """Stands for links and beacon: each look of the watch takes as long as the test says, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flashed: list[float] = []
        self._turns: SimpleQueue[tuple[float, Beat | None]] = SimpleQueue()
        self._looks: SimpleQueue[None] = SimpleQueue()
        self._over = False

    def monotonic(self) -> float:
        return self.now

    def flash(self) -> None:
        self.flashed.append(self.now)

    def next_beat(self, timeout_ms: int) -> Beat | None:
        if self._over:
            return None
        self._looks.put(None)
        seconds, beat = self._turns.get()
        self.now += seconds
        return beat

    def take(self, *turns: float, beat: Beat | None = None) -> None:
        """The watch looks for these many seconds in turn and hears nothing, but for a beat at the end of the last."""
        for index, seconds in enumerate(turns, 1):
            self._looks.get()
            self._turns.put((seconds, beat if index == len(turns) else None))
        self._looks.get()
        self._looks.put(None)

    def end(self) -> None:
        self._over = True
        self._turns.put((0.0, None))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    made = Turns()
    monkeypatch.setattr(watch, "time", made)
    return made


@pytest.fixture
def watching(turns: Turns) -> Iterator[Watch]:
    """Of rank 1, with the patience of an engine that serves."""
    made = Watch(cast(Links, turns), cast(Beacon, turns), [1])
    made.patience_s = watch.SERVING_PATIENCE_S
    yield made
    turns.end()
    made.close()


def test_a_rank_that_falls_silent_is_lost_and_one_that_speaks_again_is_not(turns: Turns, watching: Watch) -> None:
    turns.take(1.0, beat=Beat(1, 3, 0.0))
    turns.take(2.0, 2.0, 0.9)
    assert (watching.lost, watching.silence_s(1)) == ([], pytest.approx(4.9))
    turns.take(0.2)
    assert (watching.lost, watching.silence_s(1)) == ([1], pytest.approx(5.1))
    turns.take(0.1, beat=Beat(1, 4, 0.0))
    assert (watching.lost, watching.silence_s(1)) == ([], 0.0)
    assert watching.beats() == [Beat(1, 3, 0.0), Beat(1, 4, 0.0)]


def test_after_a_pause_of_the_engine_itself_no_rank_is_blamed(turns: Turns, watching: Watch) -> None:
    """It did not get to look for most of its patience: it counts anew from then on."""
    turns.take(2.0, 60.0)
    assert watching.lost == []
    turns.take(2.0, 2.0)
    assert watching.lost == []
    turns.take(2.0)
    assert watching.lost == [1]


def test_the_beacon_flashes_at_every_beat_however_long_a_look_takes(turns: Turns, watching: Watch) -> None:
    turns.take(*[BEAT_EVERY_S / 2] * 6, 7 * BEAT_EVERY_S, BEAT_EVERY_S)
    assert turns.flashed == [pytest.approx(beats * BEAT_EVERY_S) for beats in (1, 2, 3, 10, 11)]
