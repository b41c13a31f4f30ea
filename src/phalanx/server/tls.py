"""TLS: certificate and key."""

from __future__ import annotations

import os
import ssl

from phalanx.errors import ConfigError
from phalanx.server.options import ServeOptions


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """What is wrong with certificate or key is said before the model loads."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("bad_option", "Of --tls-cert and --tls-key, one is missing.", "Give both, or none.")
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not os.access(path, os.R_OK):
            raise ConfigError("bad_option", f"{flag} {path} cannot be read.", "Give a readable PEM file.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(
            "bad_option",
            f"{certificate} and {key} are no certificate and its key: {error.strerror or error}.",
            "Give PEM files that belong together, the key without a passphrase.",
        ) from None
    return context
