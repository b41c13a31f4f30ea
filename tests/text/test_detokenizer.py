"""Text that comes token by token is the text of all tokens, cut at the first stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from phalanx.text.detokenizer import Detokenizer, StopStrings
from phalanx.text.tokenizer import Tokenizer
from tests.text.conftest import FIRST_BYTE

UNFINISHED = "\ufffd"
MANY_TOKENS = "\U0001d54f"  # one character of four bytes, none of which the vocabulary joins
WORDS = [
    "a",
    "Z0",
    "é",
    "e\u0301",
    "ßж",
    "عअ",
    "中文",
    "한",
    "👍",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "🇫🇷",
    "<|im_end|>",
    "'s",
    " the",
    "\u200b",
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", ".", MANY_TOKENS]
TEXTS = st.one_of(st.lists(st.sampled_from(WORDS + SPACES), max_size=12).map("".join), st.text(max_size=20))
examples = settings(max_examples=150, deadline=None)


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@given(TEXTS)
@example(" leading space")
@example("tail \ufffd")
@example("\ufffd\ufffd inside")
@examples
def test_the_pieces_of_a_text_add_up_to_it(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(TEXTS.filter(lambda text: UNFINISHED not in text))
@example("👩‍👩‍👧 in 中文, then 🏳️‍🌈")
@examples
def test_no_piece_holds_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    """Every piece is whole characters, and the last one is out before finish."""
    tokens = tokenizer.encode(text)
    assume(UNFINISHED not in tokenizer.decode(tokens))  # the vocabulary lacks some rare bytes
    *pieces, held = pieces_of(tokenizer, tokens)
    assert not any(UNFINISHED in piece for piece in pieces)
    assert held == ""


@given(st.lists(st.integers(0, 49151), max_size=24))
@examples
def test_any_tokens_at_all_add_up(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """A model may say bytes that are no text: they come out as one decode of everything has them."""
    whole = tokenizer.decode(tokens)
    assert "".join(pieces_of(tokenizer, tokens)) == whole


@given(TEXTS, st.integers(0, 3))
@examples
def test_characters_spelt_in_byte_tokens_come_whole(sentencepiece_like: Tokenizer, text: str, cut: int) -> None:
    tokens = [FIRST_BYTE + byte for byte in text.encode()]
    assert "".join(pieces_of(sentencepiece_like, tokens)) == sentencepiece_like.decode(tokens)
    if UNFINISHED not in text:
        *pieces, _ = pieces_of(sentencepiece_like, tokens[: len(tokens) - cut])
        assert UNFINISHED not in "".join(pieces)


def test_a_character_of_many_tokens_comes_with_its_last(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(MANY_TOKENS)
    assert len(tokens) > 2
    assert pieces_of(tokenizer, tokens) == [*[""] * (len(tokens) - 1), MANY_TOKENS, ""]


def test_finish_gives_out_a_character_cut_short(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("so " + MANY_TOKENS)[:-1]
    *pieces, held = pieces_of(tokenizer, tokens)
    assert "".join(pieces).rstrip() == "so"
    assert UNFINISHED in held
    assert "".join(pieces) + held == tokenizer.decode(tokens)


def test_special_tokens_are_silent(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    tokens = [*start, *tokenizer.encode("Hi there"), *end, *tokenizer.encode(" you"), *end]
    assert "".join(pieces_of(tokenizer, tokens)) == "Hi there you"


def test_spaces_between_sentencepiece_words_are_kept(sentencepiece_like: Tokenizer) -> None:
    """Decoded alone, a word of this kind loses its space; the first one has none to keep."""
    hello, world = sentencepiece_like.encode("▁hello")[0], sentencepiece_like.encode("▁world")[0]
    assert pieces_of(sentencepiece_like, [hello, world, world, hello]) == ["hello", " world", " world", " hello", ""]


def all_cuts(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    cuts = []
    for borders in itertools.product((False, True), repeat=max(len(text) - 1, 0)):
        piece, pieces = text[:1], []
        for char, border in zip(text[1:], borders, strict=True):
            pieces, piece = ([*pieces, piece], char) if border else (pieces, piece + char)
        cuts.append([*pieces, piece])
    return cuts


def cut_at_first(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The plain definition: read on until some stop string is complete, and drop the longest that is."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def feed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    cutter, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = cutter.add(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + cutter.finish(), False


CASES = [
    ("no stop here", []),
    ("no stop here", ["###"]),
    ("ab###cd", ["###"]),
    ("ab##c###", ["###"]),
    ("ab##", ["###"]),
    ("aaab", ["aab"]),
    ("aabaabaa", ["aabaaa", "baa"]),
    ("one\n\ntwo", ["\n\n", "two"]),
    ("one two", ["two", "one two!"]),
    ("xyz", ["z", "yz", "xyz"]),
    ("xyz", ["xyz", "yz", "z"]),
    ("stop", ["stop"]),
    ("a👍b👍👍", ["👍👍"]),
]


@pytest.mark.parametrize(("text", "stops"), CASES, ids=str)
def test_however_the_text_is_cut_it_ends_at_the_first_stop_string(text: str, stops: list[str]) -> None:
    for pieces in all_cuts(text):
        assert feed(stops, pieces) == cut_at_first(text, stops)


@pytest.mark.parametrize("stops", [["abcd", "bc"], ["bc", "abcd"]], ids=str)
def test_pieces_do_not_decide_between_overlapping_stop_strings(stops: list[str]) -> None:
    """The one that is complete first ends the text, even when the piece that completes it brings another."""
    assert {feed(stops, pieces) for pieces in all_cuts("_abcd_")} == {cut_at_first("_abcd_", stops)}


@given(st.text("ab", max_size=9), st.lists(st.text("ab", min_size=1, max_size=4), max_size=1), st.data())
@settings(max_examples=300, deadline=None)
def test_any_stop_string_cuts_alike_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[first:last] for first, last in itertools.pairwise([0, *borders, len(text)])]
    assert feed(stops, pieces) == cut_at_first(text, stops)


@given(st.text("abc", max_size=10), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_what_could_begin_a_stop_string_is_held_back_and_nothing_else(text: str, stops: list[str]) -> None:
    """After every character: the shown text and the held one make up the whole, and the held one is a beginning."""
    cutter, shown = StopStrings(stops), ""
    for end, char in enumerate(text, 1):
        piece, stopped = cutter.add(char)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [text[begin:end] for begin in range(len(shown))]
        assert not any(stop.startswith(part) for stop in stops for part in longer)
    assert cutter.finish() == text[len(shown) :]
    assert cutter.finish() == ""
