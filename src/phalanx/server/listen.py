"""The socket a server listens on."""

from __future__ import annotations

import socket

from phalanx.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is told at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            "cannot_listen", f"{host}:{port}: {error.strerror}.", "Choose another --host or --port."
        ) from None
