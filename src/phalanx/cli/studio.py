"""`phalanx studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.shared import told_errors


def studio(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8800,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(help="A name this server is known by; may be repeated.")
    ] = None,
) -> None:
    """Plan in the browser. Needs neither torch nor a GPU."""
    with told_errors("studio"):
        from phalanx.web.studio import serve_studio

        serve_studio(host, port, allowed_hosts or ())
