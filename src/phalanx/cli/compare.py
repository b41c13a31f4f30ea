"""`phalanx compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.shared import AsJson, Dtype, told_errors
from phalanx.version import install_command

if TYPE_CHECKING:
    from phalanx.bench.quality import QualityReport


def compare(
    first: Annotated[str, typer.Argument(help="A checkpoint: folder, .gguf file or Hugging Face id.")],
    second: Annotated[str, typer.Argument(help="Another of the same model, such as a quantised one.")],
    prompts: Annotated[Path, typer.Option(help="One a line: text, or JSON with prompt or messages (.jsonl).")],
    tokens: Annotated[int, typer.Option(min=0, help="Of each answer to compare; 0: none.")] = 64,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """How far two checkpoints are apart: perplexity, likeliest tokens, KL and answers over the same prompts."""
    with told_errors():
        from phalanx.bench.quality import Comparison, compare_checkpoints, read_prompts

        tell(compare_checkpoints(Comparison(first, second, tokens, dtype=dtype), read_prompts(prompts)), as_json)


def tell(report: QualityReport, as_json: bool) -> None:
    from rich.console import Console

    from phalanx.bench.quality import table

    if as_json:
        print(json.dumps(report.to_dict()))
        return
    Console(highlight=False).print(table(report))
    if report.lacks_tools:
        print(f"BLEU and ROUGE of the answers need: {install_command('quality')}", file=sys.stderr)
