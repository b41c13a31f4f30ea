"""`phalanx pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.shared import told_errors


def pull(
    model: Annotated[str, typer.Argument(help="Hugging Face id, such as Qwen/Qwen3-0.6B.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HF_TOKEN", show_envvar=True, help="For models that are not for everyone.")
    ] = None,
) -> None:
    """Fetch a model into the local cache, and compare every file with its checksum. Goes on where it was broken off."""
    with told_errors():
        from rich.console import Console
        from rich.progress import Progress

        from phalanx.cli.process_list import hide_from_process_list
        from phalanx.weights.hub import check, fetch, offered

        hide_from_process_list([token or ""])
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        found = offered(model, revision, token)
        console.print(f"{found.id} at {found.commit[:12]}: {len(found.files)} files, {found.size / 1e9:.2f} GB")
        folder = fetch(found, token)
        with Progress(console=console) as progress:
            task = progress.add_task("checking", total=found.size)
            check(found, folder, lambda size: progress.advance(task, size))
        print(folder)
