"""Tokenizers to test with: the default model's, and tiny ones written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import locate

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FIRST_WORD = len(BYTES) + 1
FIRST_BYTE = 3
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

WriteGguf = Callable[..., Path]


def _numbered(words: Sequence[str]) -> dict[str, int]:
    return {word: index for index, word in enumerate(words)}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(locate(None))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def sentencepiece_like() -> Tokenizer:
    """Llama 2's and Mixtral's kind: a space is part of the word after it, unknown characters are spelt in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "▁hello", "▁world"]
    raw = RawTokenizer(BPE(_numbered(words), [], byte_fallback=True, ignore_merges=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>"))


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """A GGUF file that holds a tokenizer over all bytes, a word that always merges, and the words given."""

    def write(
        words: Sequence[str] = (),
        merges: Sequence[str] = (),
        kinds: Sequence[int] = (),
        model: str = "gpt2",
        pre: str | None = "default",
        **fields: Any,
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*BYTES, "qq", *words])
        writer.add_token_types([NORMAL] * FIRST_WORD + [*kinds] + [NORMAL] * (len(words) - len(kinds)))
        writer.add_token_merges(["q q", *merges])
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write
