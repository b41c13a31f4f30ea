"""An answer's text ends where its reader would have it end, and says why."""

from __future__ import annotations

import pytest

from phalanx.text.answer import AnswerText
from phalanx.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import MANY_TOKENS, UNFINISHED


def play(answer: AnswerText, tokens: list[int], reason: str) -> tuple[str, str | None]:
    """Its text and why it ended, if the engine ends it with the last token."""
    shown, ended = "", None
    for number, token in enumerate(tokens, 1):
        text, ended = answer.add(token, reason if number == len(tokens) else None)
        shown += text
        if ended is not None:
            break
    return shown, ended


@pytest.mark.parametrize("stop", ["capital of", "l of Fr", "is Paris.", "👍", "ce"])
def test_a_stop_string_is_found_across_tokens(tokenizer: Tokenizer, stop: str) -> None:
    text = "The capital of France is Paris. 👍 Yes."
    answer = AnswerText(tokenizer, [stop])
    assert play(answer, tokenizer.encode(text), "length") == (text[: text.index(stop)], "stop")


def test_what_was_held_for_a_stop_string_that_never_came_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer, ["Paris!"])
    *tokens, last = tokenizer.encode("It is Paris")
    assert "".join(answer.add(token, None)[0] for token in tokens) == "It is"
    assert answer.add(last, "length") == (" Paris", "length")


def test_a_stop_string_can_end_in_the_last_unfinished_bytes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("so " + MANY_TOKENS)[:-1]
    told = play(AnswerText(tokenizer, [UNFINISHED]), tokens, "length")
    assert told == (tokenizer.decode(tokens).partition(UNFINISHED)[0], "stop")


@pytest.mark.parametrize("stops", [[], ["Paris!"]])
def test_the_token_that_ended_it_is_no_text(tokenizer: Tokenizer, stops: list[str]) -> None:
    tokens = tokenizer.encode("It is Paris")
    answer = AnswerText(tokenizer, stops, ends=[tokens[-1]])
    assert play(answer, tokens, "stop") == ("It is", "stop")


@pytest.mark.parametrize(("reason", "ends"), [("length", True), ("stop", False)])
def test_a_token_that_did_not_end_it_is_text(tokenizer: Tokenizer, reason: str, ends: bool) -> None:
    """An end token that was to be ignored; the last token of a finished grammar."""
    tokens = tokenizer.encode("It is Paris")
    answer = AnswerText(tokenizer, [], ends=tokens[-1:] if ends else [])
    assert play(answer, tokens, reason) == ("It is Paris", reason)
