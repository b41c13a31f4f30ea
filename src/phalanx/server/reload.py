"""What can change while the server runs: keys, and the certificate."""

from __future__ import annotations

import logging
import os
import ssl

from phalanx.errors import ConfigError
from phalanx.server.options import ServeOptions

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
        check_tls(options)
        assert options.tls_cert is not None
        tls.load_cert_chain(options.tls_cert, options.tls_key)
        log.info("read the certificate anew")
    except ConfigError as error:
        log.error("the certificate stays as it was: %s", error)


def check_tls(options: ServeOptions) -> None:
    """What is wrong with certificate or key is said before the model loads."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError("bad_option", "Of --tls-cert and --tls-key, one is missing.", "Give both, or none.")
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not os.access(path, os.R_OK):
            raise ConfigError("bad_option", f"{flag} {path} cannot be read.", "Give a readable PEM file.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(
            "bad_option",
            f"{certificate} and {key} are no certificate and its key: {error.strerror or error}.",
            "Give PEM files that belong together, the key without a passphrase.",
        ) from None
