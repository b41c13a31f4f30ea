"""Tokenizers of Hugging Face folders and GGUF files, behind one small face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from phalanx.errors import ModelError, RequestError
from phalanx.weights.gguf_file import GgufFile

Messages = Sequence[Mapping[str, Any]]

_CONTROL = 3
_USER_DEFINED = 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._backend = backend

    @classmethod
    def load(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint; None where it has none and only token ids can be served."""
        if path.suffix == ".gguf":
            return cls(_from_gguf(GgufFile(path)))
        if not (path / "tokenizer.json").exists():
            return None
        return cls(PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True))

    @property
    def backend(self) -> PreTrainedTokenizerFast:
        """The tokenizer itself, for those who read its vocabulary."""
        return self._backend

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Messages through the model's chat template, ready for its answer."""
        if not self._backend.chat_template:
            raise RequestError(
                "no_chat_template", "This model's tokenizer has no chat template.", "Use a plain prompt instead."
            )
        _check_messages(messages)
        text = self._backend.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self._backend.encode(text, add_special_tokens=False)


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise RequestError("empty_prompt", "The conversation has no messages.", "Give at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(
                "bad_message", f"Message {index} is {message!r}.", "A message is {'role': ..., 'content': ...}."
            )


def _from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the vocabulary and merges in the file."""
    fields = file.fields
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(
            "unsupported_tokenizer",
            f"{file.path.name} has a tokenizer of kind {fields.get('tokenizer.ggml.model')!r}.",
            "Phalanx reads byte-level BPE ('gpt2') from GGUF; for others use the safetensors version of the model.",
        )
    missing = {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")} - fields.keys()
    if missing:
        raise ModelError(
            "unsupported_tokenizer", f"{file.path.name} lacks {', '.join(sorted(missing))}.", "Use another GGUF file."
        )
    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    rules = fields.get("tokenizer.ggml.pre", "default")
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = RawTokenizer(BPE(vocabulary, merges, ignore_merges=rules == "llama-bpe"))
    raw.pre_tokenizer, raw.normalizer = _splitting(rules)
    raw.decoder = ByteLevelDecoder()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [word for word, its_kind in zip(words, kinds, strict=True) if its_kind == kind]
        raw.add_tokens([AddedToken(word, special=special, normalized=False) for word in chosen])
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    named = {
        f"{name}_token": words[fields[f"tokenizer.ggml.{key}"]]
        for name, key in names.items()
        if f"tokenizer.ggml.{key}" in fields
    }
    if fields.get("tokenizer.ggml.add_bos_token", rules == "llama-bpe") and "bos_token" in named:
        bos = named["bos_token"]
        raw.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, **named)


def _splitting(kind: str) -> tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None]:
    """How text is cut before merging: each family has its own pattern."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("default", "gpt-2"):
        return plain, None
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]), None
    digits = {"llama-bpe": r"|\p{N}{1,3}", "qwen2": r"|\p{N}"}
    if kind not in digits:
        raise ModelError(
            "unsupported_tokenizer",
            f"The GGUF file cuts text by the rules of {kind!r}.",
            "Use the safetensors version of the model.",
        )
    split = pre_tokenizers.Split(Regex(_CONTRACTIONS + digits[kind] + _REST), "isolated")
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, unsplit]), normalizers.NFC() if kind == "qwen2" else None
