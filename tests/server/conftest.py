"""A tiny model with a tokenizer and a chat template, and servers of it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import VOCAB, make_checkpoint
from tests.forked import start_beside_loop
from tests.server.running import Server, running

TEMPLATE = (
    "{% if tools %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It is told of tools and keeps them to itself: in words they would fill the context of these models."""


def add_tokenizer(folder: Path) -> None:
    """Byte-level BPE with as many tokens as the tiny models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).parents[2] / "README.md"
    raw.train_from_iterator([text.read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="package", autouse=True)
def _forked_helpers() -> Iterator[None]:
    """Processes that this one starts beside a loop start at once: see `tests/forked.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start_beside_loop)
        yield


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_chat")
    make_checkpoint("llama", folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="package")
def server(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it: two ranks, small KV cache, hermes tools."""
    options = ("--tp", "2", "--served-model-name", "tiny", "--tool-call-parser", "hermes", "--max-num-seqs", "16")
    with running(tiny_chat, tmp_path_factory.mktemp("server"), *options) as started:
        yield started


def make_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="package")
def locked(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with keys and TLS, started as a user would, and its certificate."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("from-file\n\nanother\n")
    certificate, key = make_certificate(folder)
    options = ("--api-key", "from-flag", "--api-key-file", str(folder / "keys"), "--served-model-name", "tiny")
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key), "--cors-origin", "https://app.example")
    with running(tiny_chat, folder, *options, *tls, fresh=True) as server:
        yield server, certificate
