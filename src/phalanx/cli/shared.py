"""What commands share: options, and how errors are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from phalanx.errors import PhalanxError
from phalanx.version import install_command

Model = Annotated[
    str | None, typer.Argument(help="Checkpoint folder, .gguf file or Hugging Face id. Default: SmolLM2-135M-Instruct.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Ranks to share the model.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32 (float32), bf16 (bfloat16) or fp16 (float16, half).")]
KvCacheDtype = Annotated[str, typer.Option(help="Keys and values: auto (as dtype) or fp8 (e4m3, half of bf16).")]
StateDtype = Annotated[
    str, typer.Option(help="Recurrent states: auto (fp32), fp32 or bf16 (half; answers vary with drafts and batches).")
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]
ExecutorOption = Annotated[str, typer.Option(help="local: ranks on this machine; ray: on the nodes of a Ray cluster.")]
RanksPerNode = Annotated[int | None, typer.Option(min=1, help="ray: default is one a GPU, or one a node on CPUs.")]
Interface = Annotated[str | None, typer.Option(help="ray: network interface ranks talk over. Default: Ray's.")]
RayAddress = Annotated[str | None, typer.Option(help="ray: HOST:PORT. Default: RAY_ADDRESS, or this machine's.")]
ShareGpus = Annotated[bool, typer.Option("--share-gpus", help="Ranks may share GPUs. For tests: slow.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def told_errors(extra: str = "serve") -> Iterator[None]:
    """Errors Phalanx raises on purpose are told in two lines, without a traceback. `extra` has what may be missing."""
    try:
        yield
    except PhalanxError as error:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error[/] {error.code}: ", end="")
        print(f"{error.found}\n{error.fix}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        extra = "plot" if error.name in ("matplotlib", "numpy") else extra
        print(f"error: this command needs {error.name}: {install_command(extra)}", file=sys.stderr)
        raise typer.Exit(1) from None
