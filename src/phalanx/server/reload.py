"""What can change while the server runs: keys, and the certificate."""

from __future__ import annotations

import logging
import ssl

from phalanx.errors import ConfigError
from phalanx.server.options import ServeOptions
from phalanx.server.tls import tls_context

log = logging.getLogger("phalanx.server")


def reload(options: ServeOptions, tls: ssl.SSLContext | None) -> None:
    """Read keys and certificate anew. What cannot be read stays as it was; connections stay open either way."""
    several = options.keys.several
    try:
        options.keys.reload()
        log.info("read the keys anew: there are %d", len(options.keys))
    except ConfigError as error:
        log.error("the keys stay as they were: %s", error)
    if options.keys.several != several:
        log.warning("one key has become several, or several one: how they share changes at the next start")
    if tls is None:
        return
    try:
        tls_context(options)
        assert options.tls_cert is not None
        tls.load_cert_chain(options.tls_cert, options.tls_key)
        log.info("read the certificate anew")
    except ConfigError as error:
        log.error("the certificate stays as it was: %s", error)
