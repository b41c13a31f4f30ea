"""Tokenizers of GGUF files and of folders encode as their makers' own, and those not known are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from phalanx.errors import ModelError, RequestError
from phalanx.spec.gguf import GgufFile
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import locate
from tests.conftest import plain_mappings
from tests.text.conftest import BYTES, CONTROL, FIRST_WORD, USER_DEFINED, WriteGguf

PROSE = [
    "",
    "The capital of France is",
    " leading and trailing ",
    "two  spaces,   three\n\n\nlines\r\n\ttabs",
    "It's we'll they've I'M DON'T",
    "naïve café, e\u0301 ≠ é, Straße, ñandú",
    "Привет мир! 你好、世界。 こんにちは 안녕하세요 مرحبا नमस्ते",
    "👍🏽 👩‍👩‍👧 🏳️‍🌈 🇫🇷",
    "def f(x):\n    return [y ** x for y in self._things]\n",
    "https://example.org/a?b=c&d=%zz#e_f",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start |> <|im_end|",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there "}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "你好 <|im_end|>"},
    ],
]


@pytest.fixture(scope="session")
def theirs() -> Any:
    """transformers' own reading of the default model's file."""
    path = locate(None)
    with plain_mappings():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def vocabulary() -> set[str]:
    return set(GgufFile(locate(None)).fields["tokenizer.ggml.tokens"])


def token_texts(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of every token; for tokens that are whole characters."""
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", PROSE)
def test_the_default_model_encodes_as_in_transformers(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    """Without digits: transformers does not read how the file wants them cut."""
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("text", ["2026", "3.14159", "1,000,000", "x86_64"])
def test_the_default_model_reads_digits_one_by_one(tokenizer: Tokenizer, text: str) -> None:
    tokens = token_texts(tokenizer, text)
    assert "".join(tokens) == text
    assert [token for token in tokens if any(char.isdigit() for char in token)] == [c for c in text if c.isdigit()]


def test_special_tokens_are_one_token_each(tokenizer: Tokenizer) -> None:
    fields = GgufFile(locate(None)).fields
    specials = [
        index for index, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind in (CONTROL, USER_DEFINED)
    ]
    assert len(specials) > 10
    for index in specials:
        word = fields["tokenizer.ggml.tokens"][index]
        assert tokenizer.encode(f"a{word}b")[1:-1] == [index]
        assert tokenizer.decode(tokenizer.encode(f"a{word}b")) == "ab"


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_what_is_encoded_can_be_read_again(tokenizer: Tokenizer, vocabulary: set[str], text: str) -> None:
    """Where the vocabulary has all bytes of the text: the default model's lacks some that its training never saw."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assume(vocabulary.issuperset("".join(word for word, _ in spelt)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_chat_is_written_as_transformers_writes_it(
    tokenizer: Tokenizer, theirs: Any, messages: list[dict[str, str]]
) -> None:
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == theirs.encode(text, add_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n")


def test_a_chat_must_have_messages_with_role_and_content(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no messages") as empty:
        tokenizer.encode_chat([])
    assert empty.value.code == "empty_prompt"
    with pytest.raises(RequestError, match="Message 1") as bad:
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}, {"content": "no role"}])
    assert bad.value.code == "bad_message"


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def save_folder(folder: Path, chat_template: str | None) -> PreTrainedTokenizerFast:
    words = [*BYTES, "he", "llo", "hello", "<|end|>"]
    raw = RawTokenizer(BPE({word: index for index, word in enumerate(words)}, [("h", "e")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", chat_template=chat_template)
    saved.save_pretrained(folder)
    return saved


def test_a_saved_tokenizer_loads_from_its_folder_and_chats(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{{ '>' }}"
    saved, messages = save_folder(tmp_path, template), [{"role": "me", "content": "hé 👍"}]
    assert (tmp_path / "tokenizer.json").exists()
    loaded = load(tmp_path)
    assert loaded.encode("hello, hé 👍") == saved.encode("hello, hé 👍")
    assert loaded.decode(loaded.encode("hello <|end|>, hé 👍")) == "hello , hé 👍"
    assert loaded.encode_chat(messages) == saved.encode("me: hé 👍<|end|>>", add_special_tokens=False)


def test_a_model_without_a_chat_template_cannot_chat(tmp_path: Path, write_gguf: WriteGguf) -> None:
    save_folder(tmp_path, None)
    for path in (tmp_path, write_gguf()):
        with pytest.raises(RequestError, match="no chat template") as error:
            load(path).encode_chat(CONVERSATIONS[0])
        assert error.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("kind", "named"), [({"model": "llama"}, "'llama'"), ({"model": "bert"}, "'bert'"), ({"pre": "tekken"}, "'tekken'")]
)
def test_a_gguf_tokenizer_of_another_kind_is_refused_by_name(
    write_gguf: WriteGguf, kind: dict[str, str], named: str
) -> None:
    with pytest.raises(ModelError, match=named) as error:
        Tokenizer.load(write_gguf(**kind))
    assert error.value.code == "unsupported_tokenizer"


NUMBERS = ["11", "1111", "111111", "111", "'S"]
NUMBER_MERGES = ["1 1", "11 11", "1111 11", "11 1", "' S"]


@pytest.mark.parametrize(
    ("pre", "numbers", "letters"),
    [
        ("llama-bpe", ["111", "111", "1"], ["a", "'S"]),
        ("qwen2", ["1"] * 7, ["a", "'S"]),
        ("smollm", ["1"] * 7, ["a", "'", "S"]),
        ("default", ["111111", "1"], ["a", "'", "S"]),
        ("gpt-2", ["111111", "1"], ["a", "'", "S"]),
        (None, ["111111", "1"], ["a", "'", "S"]),
    ],
)
def test_each_kind_of_gguf_tokenizer_cuts_numbers_and_contractions_its_own_way(
    write_gguf: WriteGguf, pre: str | None, numbers: list[str], letters: list[str]
) -> None:
    """The merges would join up to six ones, and 'S to one: only where the text is cut can they not."""
    tokenizer = load(write_gguf(NUMBERS, NUMBER_MERGES, pre=pre))
    assert token_texts(tokenizer, "1111111") == numbers
    assert token_texts(tokenizer, "a'S") == letters


def test_newlines_after_signs_stay_with_them_in_llama_and_qwen(write_gguf: WriteGguf) -> None:
    for pre, tokens in (("llama-bpe", [".\n"]), ("qwen2", [".\n"]), ("gpt-2", [".", "\n"])):
        assert token_texts(load(write_gguf([".Ċ"], [". Ċ"], pre=pre)), ".\n") == tokens


def test_qwen_composes_characters_first_and_llama_leaves_them(write_gguf: WriteGguf) -> None:
    assert load(write_gguf(pre="qwen2")).encode("e\u0301") == load(write_gguf(pre="qwen2")).encode("é")
    llama = load(write_gguf(pre="llama-bpe"))
    assert llama.decode(llama.encode("e\u0301")) == "e\u0301"


def test_tokens_the_user_defined_are_whole_and_visible(write_gguf: WriteGguf) -> None:
    tokenizer = load(write_gguf(["<think>", "<|end|>"], kinds=[USER_DEFINED, CONTROL]))
    assert tokenizer.encode("<think><|end|>") == [FIRST_WORD, FIRST_WORD + 1]
    assert tokenizer.decode([FIRST_WORD, FIRST_WORD + 1]) == "<think>"


def test_a_whole_word_of_llama_3_is_one_token_even_without_merges_to_it(write_gguf: WriteGguf) -> None:
    """llama.cpp and tokenizer.json ignore the merges for words the vocabulary has (`ignore_merges`)."""
    assert load(write_gguf(["Ġfor", "xyz"], pre="llama-bpe")).encode("xyz for") == [FIRST_WORD + 1, FIRST_WORD]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_file_says_whether_a_prompt_begins_with_bos(write_gguf: WriteGguf, wanted: bool) -> None:
    path = write_gguf(["<|bos|>"], kinds=[CONTROL], pre="llama-bpe", bos_token_id=FIRST_WORD, add_bos_token=wanted)
    assert load(path).encode("a") == [FIRST_WORD] * wanted + [BYTES.index("a")]
