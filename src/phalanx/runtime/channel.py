"""Private unix sockets between the processes of one engine; each message carries a token."""

from __future__ import annotations

from hmac import compare_digest

import zmq

Context = zmq.Context[zmq.Socket[bytes]]


class Sender:
    """The sending end. It connects, so it never blocks: what it sends waits for a reader, be it alive, late or gone.

    With a limit, what would be one message too many is dropped instead.
    """

    def __init__(self, context: Context, address: str, token: str, limit: int = 0) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(limit)
        self._token = token.encode()
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        try:
            self._socket.send_multipart([self._token, *frames], zmq.DONTWAIT)
        except zmq.Again:
            return


class Receiver:
    """The receiving end, of any number of senders. Messages without the token are dropped."""

    def __init__(self, context: Context, address: str, token: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._token = token.encode()
        self._socket.bind(address)

    def receive(self, timeout_ms: int | None = None) -> list[bytes] | None:
        """The frames of the next message; None if none comes in time. Without a time-out it waits for one."""
        while self._socket.poll(timeout_ms):
            token, *frames = self._socket.recv_multipart()
            if compare_digest(token, self._token):
                return frames
        return None
