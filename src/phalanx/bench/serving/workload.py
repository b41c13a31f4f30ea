"""Workload: the queries of a run, and what all datasets make them with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from phalanx.bench.serving.client import Query
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Rare words and many scripts, so that the tokens reach far into a vocabulary.
PROBE = """photosynthesis antidisestablishmentarianism Massachusetts ArrayList zygote Xylophone quokka Übergrößenträger
déjà vu Привет мир 你好世界 こんにちは 안녕하세요 مرحبا नमस्ते ελληνικά 🙂 {}();"""


@dataclass(frozen=True)
class QuerySet:
    """Warm-up has prompts (and a shared prefix) of its own: what is measured was never seen by the server."""

    queries: list[Query]
    warmup: list[Query]
    notes: list[str]


def in_json(content: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(content))


def load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("no_tokenizer", f"{file} does not exist.", "Name a checkpoint's folder with --tokenizer.")
    return Tokenizer.from_file(str(file))
