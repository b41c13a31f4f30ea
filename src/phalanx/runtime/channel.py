"""Sockets between the processes of one engine; each message carries a token.

On one machine they are unix sockets in a private folder. Between machines they are TCP on one chosen address, encrypted
by CURVE, and each end only talks to keys it knows.
"""

from __future__ import annotations

from collections.abc import Collection
from hmac import compare_digest

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

Context = zmq.Context[zmq.Socket[bytes]]


class Keys(msgspec.Struct, frozen=True):
    """One end's pair of CURVE keys, in Z85."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Gate:
    """Lets only these public keys connect to the sockets that a context binds with keys."""

    def __init__(self, context: Context, admitted: Collection[str]) -> None:
        self._admitted = {key.encode() for key in admitted}
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """What zmq asks about a key that knocks."""
        return key in self._admitted

    def close(self) -> None:
        self._thread.stop()


def _bind(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> None:
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.bind(address)


def _connect(socket: zmq.Socket[bytes], address: str, keys: Keys | None, peer: str | None) -> None:
    if keys is not None and peer is not None:
        socket.curve_serverkey = peer.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.connect(address)


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


class Sender:
    """The sending end. It connects, so it never blocks: what it sends waits for a reader, be it alive, late or gone.

    With a limit, what would be one message too many is dropped instead. `peer` is the reader's public key.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        token: str,
        limit: int = 0,
        keys: Keys | None = None,
        peer: str | None = None,
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(limit)
        self._token = token.encode()
        _connect(self._socket, address, keys, peer)

    def send(self, *frames: bytes) -> None:
        try:
            self._socket.send_multipart([self._token, *frames], zmq.DONTWAIT)
        except zmq.Again:
            return


class Receiver:
    """The receiving end, of any number of senders. Messages without the token are dropped."""

    def __init__(self, context: Context, address: str, token: str, keys: Keys | None = None) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._token = token.encode()
        _bind(self._socket, address, keys)
        self.address = _endpoint(self._socket)
        """Where senders connect to: an address given as `tcp://HOST:*` has its port here."""

    def receive(self, timeout_ms: int | None = None) -> list[bytes] | None:
        """The frames of the next message; None if none comes in time. Without a time-out it waits for one."""
        while True:
            try:
                token, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                if timeout_ms == 0 or not self._socket.poll(timeout_ms):
                    return None
                continue
            if compare_digest(token, self._token):
                return frames

    def fileno(self) -> int:
        """Readable when the first message has come; then all must be received before it tells of the next."""
        return self._socket.FD


class Beacon:
    """Tells whoever listens that this process lives."""

    def __init__(self, context: Context, address: str, token: str, keys: Keys) -> None:
        self._socket = context.socket(zmq.PUB)
        self._token = token.encode()
        _bind(self._socket, address, keys)
        self.address = _endpoint(self._socket)

    def flash(self) -> None:
        self._socket.send(self._token)


class Lookout:
    """Sees a beacon."""

    def __init__(self, context: Context, address: str, token: str, keys: Keys, peer: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(token)
        _connect(self._socket, address, keys, peer)

    def sees(self, timeout_ms: int) -> bool:
        """Whether the beacon flashes within this time."""
        if not self._socket.poll(timeout_ms):
            return False
        self._socket.recv()
        return True
