"""Channels between machines: who has no key, or another key, or no token, is not heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from phalanx.engine.plan import Beat
from phalanx.runtime import watch
from phalanx.runtime.channel import Beacon, Context, Gate, Keys, Lookout, Receiver, Sender
from phalanx.runtime.links import Links
from phalanx.runtime.messages import Ready, encode
from phalanx.runtime.watch import Watch
from tests.server.running import eventually

TOKEN = "token"
HERE = "tcp://127.0.0.1:*"
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


def test_nobody_else_is_heard(near: Context, far: Context) -> None:
    """A stranger's key, no key at all, a wrong idea of whom it talks to, a wrong token: then one who may speak."""
    receiver = Receiver(near, HERE, TOKEN, ENGINE)
    refused = [
        Sender(far, receiver.address, TOKEN, keys=STRANGER, peer=ENGINE.public),
        Sender(far, receiver.address, TOKEN),
        Sender(far, receiver.address, TOKEN, keys=RANK, peer=STRANGER.public),
        Sender(far, receiver.address, "guess", keys=RANK, peer=ENGINE.public),
    ]
    for sender in refused:
        sender.send(b"evil")
    time.sleep(0.5)
    known = Sender(far, receiver.address, TOKEN, keys=RANK, peer=ENGINE.public)
    known.send(b"good")
    assert heard(receiver) == [b"good"]
    assert heard(receiver, 0.5) is None


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
    stranger = Lookout(far, beacon.address, TOKEN, STRANGER, ENGINE.public)
    deadline = time.monotonic() + 20
    seen = False
    while not seen and time.monotonic() < deadline:
        beacon.flash()
        seen = lookout.sees(100)
    assert seen
    while lookout.sees(200):
        pass
    beacon.flash()
    assert not stranger.sees(500)


def links_and_sender(near: Context, far: Context) -> tuple[Links, Sender]:
    links = Links(near, HERE, HERE, TOKEN, ENGINE, {1: RANK.public})
    return links, Sender(far, links.beats.address, TOKEN, keys=RANK, peer=ENGINE.public)


def test_orders_go_to_where_a_rank_says_it_takes_them(near: Context, far: Context) -> None:
    gate = Gate(far, [ENGINE.public])
    links = Links(near, HERE, HERE, TOKEN, ENGINE, {1: RANK.public})
    orders = Receiver(far, HERE, TOKEN, RANK)
    reports = Sender(far, links.reports.address, TOKEN, keys=RANK, peer=ENGINE.public)
    reports.send(encode(Ready(1, 7, orders.address)))
    assert links.receive(20_000) == Ready(1, 7, orders.address)
    links.send([b"plan"])
    assert heard(orders) == [b"plan"]
    gate.close()


def test_a_rank_that_falls_silent_is_lost_and_one_that_speaks_again_is_not(near: Context, far: Context) -> None:
    links, rank = links_and_sender(near, far)
    watching = Watch(links, Beacon(near, HERE, TOKEN, ENGINE), [1])
    rank.send(encode(Beat(1, 3, 0.0)))
    assert eventually(lambda: watching.beats() == [Beat(1, 3, 0.0)])
    assert watching.lost == []
    watching.patience_s = 1.0
    assert eventually(lambda: watching.lost == [1])
    assert watching.silence_s(1) >= 1.0
    watching.patience_s = 60.0
    rank.send(encode(Beat(1, 4, 0.0)))
    assert eventually(lambda: watching.lost == [])
    watching.close()


def test_after_a_pause_of_the_engine_itself_no_rank_is_blamed(
    near: Context, far: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch does not get to look for longer than its patience: it counts anew from then on."""
    links, _ = links_and_sender(near, far)
    paused = links.next_beat
    monkeypatch.setattr(links, "next_beat", lambda timeout_ms: time.sleep(watch.SERVING_PATIENCE_S / 2 + 0.1))
    watching = Watch(links, Beacon(near, HERE, TOKEN, ENGINE), [1])
    watching.patience_s = 0.0
    time.sleep(watch.SERVING_PATIENCE_S / 2 + 0.5)
    assert watching.lost == []
    monkeypatch.setattr(links, "next_beat", paused)
    watching.close()
