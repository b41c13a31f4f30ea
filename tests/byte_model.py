"""A byte-level tokenizer small enough to see through, and a model folder that has it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from phalanx.server.grammar.matcher import GrammarMatcher, Grammars
from phalanx.text.tokenizer import Tokenizer

_PIECES = [
    *(
        '{"',
        '":',
        '": ',
        '",',
        '"}',
        '", "',
        "},",
        "}]",
        ' "',
        "\n\n",
        "  ",
        "true",
        "false",
        "null",
        "123",
        "0.5",
        '\\"',
    ),
    *(
        "</parameter>",
        "ab",
        "the ",
        "é",
        "日本",
        "=1",
        "((",
        "True",
        "None",
        "</",
        "\\n",
        "://",
        "2024-02-2",
        "a@b",
        "\t\t",
    ),
]
_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|unseen|>", "<|end|>"]
SPECIAL = {"<|unseen|>", "<|end|>"}

HALF = b"\xed\xa0"
"""Bytes that no text in UTF-8 has."""
TOKENS: list[bytes] = [*(bytes([byte]) for byte in range(256)), HALF, *(piece.encode() for piece in _PIECES)]
TOKENS += [tag.encode() for tag in _TAGS]
EOS = len(TOKENS) - 1
UNSEEN = EOS - 1
VOCAB = 512
"""Of the model: larger than the tokenizer's, and the rows between them mean nothing."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = _byte_alphabet()
    words = ["".join(alphabet[byte] for byte in token) for token in TOKENS[: -len(_TAGS)]]
    raw = RawTokenizer(BPE({word: index for index, word in enumerate(words)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(tag, special=tag in SPECIAL, normalized=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def _byte_alphabet() -> dict[int, str]:
    """Which character byte-level tokenizers write for a byte: itself where it can be printed, else one above 255."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def make_grammars() -> Grammars:
    return Grammars(Tokenizer(make_tokenizer()), VOCAB, [EOS])


def with_byte_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint that knows this tokenizer and its end."""
    shutil.copytree(model, folder)
    make_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def allowed_tokens(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def random_text(matcher: GrammarMatcher, rng: random.Random, most: int = 600) -> bytes | None:
    """A text by the grammar, made of random tokens with a liking for the end; None if it does not come to one."""
    text = b""
    for step in range(most):
        if matcher.finished:
            return text
        tokens, urge = allowed_tokens(matcher.mask()), 5 if step < 40 else 500
        weights = [urge if TOKENS[token] in _CLOSING else _LIKING.get(token, 1) for token in tokens]
        token = rng.choices(tokens, weights)[0]
        matcher.accept(token)
        text += TOKENS[token] if token != EOS else b""
    return text if matcher.finished else None


_CLOSING = {b'"', b"}", b"]", b")", b"'", b"</parameter>", b"</think>", b"<|end|>"}
_LIKING = dict.fromkeys(range(128, 256), 0.05) | dict.fromkeys(b" \n\t\r", 0.3)
