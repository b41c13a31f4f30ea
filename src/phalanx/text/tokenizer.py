"""Tokenizers of Hugging Face folders and GGUF files, behind one small face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from phalanx.errors import CheckpointError, ModelError, PhalanxError, RequestError
from phalanx.spec.gguf import GgufFile

Messages = Sequence[Mapping[str, Any]]

_MOST_REMEMBERED = 2**17
_CONTROL = 3
_USER_DEFINED = 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as itself and the others as the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._backend = backend
        self._raw: RawTokenizer = backend.backend_tokenizer
        self._added = self._raw.get_added_tokens_decoder().keys()
        self._byte_level = isinstance(self._raw.decoder, ByteLevelDecoder)
        self._decode_one = lru_cache(_MOST_REMEMBERED)(self._decode)

    @classmethod
    def load(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint; None where it has none and only token ids can be served."""
        if path.suffix == ".gguf":
            return cls(_read_gguf(GgufFile(path)))
        if not (path / "tokenizer.json").is_file():
            return None
        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True))
        except Exception as error:
            raise CheckpointError(
                "broken_file",
                f"The tokenizer in {path} cannot be read: {type(error).__name__}: {str(error)[:200]}.",
                "Download its tokenizer.json and tokenizer_config.json again.",
            ) from None

    @property
    def backend(self) -> PreTrainedTokenizerFast:
        """The tokenizer itself, for those who read its vocabulary."""
        return self._backend

    @property
    def chat_templates(self) -> dict[str, str]:
        """By name; a model with only one has it as the default."""
        templates = self._backend.chat_template or {}
        return templates if isinstance(templates, dict) else {"default": templates}

    def info(self) -> dict[str, Any]:
        """What a client needs to render and count prompts by itself, under the names of tokenizer_config.json."""
        return {
            "tokenizer_class": type(self._backend).__name__,
            "vocab_size": len(self._backend),
            "chat_template": self._backend.chat_template,
            "add_bos_token": bool(self.encode("")),
            **self._backend.special_tokens_map,
        }

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids; `special_tokens` adds those a text begins with, which a chat template writes itself."""
        return self._backend.encode(text, add_special_tokens=special_tokens)

    @property
    def tokens_stand_alone(self) -> bool:
        """Whether a token means the same bytes wherever it is."""
        return self._byte_level

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        """The text of tokens. That of a single one is remembered: it is what streams ask for."""
        if len(tokens) > 1:
            return self._decode(tokens, keep_special)
        return self._decode_one(tuple(tokens), keep_special) if tokens else ""

    def _decode(self, tokens: Sequence[int], keep_special: bool) -> str:
        return self._raw.decode(tokens, skip_special_tokens=not keep_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for: perhaps only a part of a character."""
        word = self._raw.id_to_token(token)
        if word is None:
            return b""
        if self._byte_level and token not in self._added and all(character in _BYTE_OF for character in word):
            return bytes(_BYTE_OF[character] for character in word)
        if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            return bytes([int(word[3:5], 16)])
        return word.replace("\u2581", " ").encode()

    def encode_chat(self, messages: Messages) -> list[int]:
        """Messages through the model's chat template, ready for its answer."""
        return self.encode(self.render_chat(messages), special_tokens=False)

    def render_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> str:
        """The text the chat template makes of a conversation, up to where the answer begins."""
        if not self._backend.chat_template:
            raise RequestError(
                "no_chat_template", "This model's tokenizer has no chat template.", "Use a plain prompt instead."
            )
        _check_messages(messages)
        try:
            return self._backend.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(
                "bad_conversation",
                f"The model's chat template refuses this conversation: {error}.",
                "Templates usually want roles to alternate and contents to be text.",
            ) from error


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise RequestError("empty_prompt", "The conversation has no messages.", "Give at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(
                "bad_message", f"Message {index} is {message!r}.", "A message is {'role': ..., 'content': ...}."
            )


def _read_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    try:
        return _from_gguf(file)
    except (PhalanxError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers package panics with one that is no Exception
        raise CheckpointError(
            "broken_file",
            f"The tokenizer in {file.path} cannot be read: {type(error).__name__}: {str(error)[:200]}.",
            "Download the file again, or use the safetensors version of the model.",
        ) from None


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
    ids = {name: fields[f"tokenizer.ggml.{key}"] for name, key in names.items() if f"tokenizer.ggml.{key}" in fields}
    if strange := {name: token for name, token in ids.items() if token not in range(len(words))}:
        raise ValueError(f"of {len(words)} tokens there is none of the number of {strange}")
    named = {f"{name}_token": words[token] for name, token in ids.items()}
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
