"""Ports to listen on, for programs that have to be told one."""

from __future__ import annotations

import random
import socket

_NOBODYS = range(20_000, 32_000)
"""Below those that the system gives to whoever asks for any, and above those that Ray's workers take."""


def free_port(ip: str = "127.0.0.1") -> int:
    """One that nobody listens on. Seconds may pass before it is used: those that the system hands out may be gone."""
    for port in random.SystemRandom().sample(_NOBODYS, 100):
        with socket.socket() as listener:
            try:
                listener.bind((ip, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port is free from {_NOBODYS.start} to {_NOBODYS.stop}")
