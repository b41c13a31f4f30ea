"""What a comparison found, for people and for programs, and the prompts it is about."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.bench.quality.measures import Figure
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a conversation."""

_TITLES = {
    "first_perplexity": ("perplexity of the first", "{:.3f}"),
    "second_perplexity": ("perplexity of the second", "{:.3f}"),
    "perplexity_ratio": ("second / first", "{:.4f}"),
    "top_1_agreement": ("same likeliest token", "{:.2%}"),
    "kl_nats": ("KL, nats a token", "{:.5f}"),
    "bleu": ("BLEU of answers", "{:.1f}"),
    "rouge_l": ("ROUGE-L of answers", "{:.3f}"),
}


@dataclass(frozen=True)
class QualityReport:
    """`same_answers`: how many are the same to the letter; None where no answers were asked for. `lacks_tools`: whether
    their overlap could not be told.
    """

    first: str
    second: str
    texts: int
    tokens: int
    figures: dict[str, Figure]
    same_answers: int | None
    lacks_tools: bool = False

    def to_dict(self) -> dict[str, Any]:
        told = {name: figure._asdict() for name, figure in self.figures.items()}
        about = {"first": self.first, "second": self.second, "texts": self.texts, "tokens": self.tokens}
        return about | {"same_answers": self.same_answers} | told


def table(report: QualityReport) -> Table:
    from rich.table import Table

    shown = Table("", "", "95 % interval", box=None, title=f"{report.tokens:,} tokens of {report.texts} texts")
    for name, figure in report.figures.items():
        title, form = _TITLES[name]
        between = "-"
        if figure.low is not None and figure.high is not None:
            between = f"{form.format(figure.low)} to {form.format(figure.high)}"
        shown.add_row(title, form.format(figure.value), between)
    if report.same_answers is not None:
        shown.add_row("same answer to the letter", f"{report.same_answers} of {report.texts}", "-")
    return shown


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("bad_text", f"{file} cannot be read: {error}.", "Give a file of UTF-8 text.") from None


def read_prompts(file: Path) -> list[Prompt]:
    """One a line: plain text, or JSON with `prompt`, `text` or `messages`."""
    lines = read_text(file).splitlines()
    as_json = file.suffix in (".jsonl", ".json")
    prompts = [
        _from_json(line, number) if as_json else line for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise ConfigError("bad_prompts", f"{file} has no prompt.", "Write one a line.")
    return prompts


def _from_json(line: str, number: int) -> Prompt:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if isinstance(told, dict):
        for name, kind in (("prompt", str), ("text", str), ("messages", list)):
            if isinstance(told.get(name), kind):
                return told[name]
    raise ConfigError(
        "bad_prompts", f"Line {number} has no prompt: {line[:60]!r}.", 'Write {"prompt": "..."} or {"messages": [...]}.'
    )
