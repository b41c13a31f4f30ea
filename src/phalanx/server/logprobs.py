"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs
from phalanx.text.tokenizer import Tokenizer

_LOWEST = -9999.0

SampledTokens = Sequence[tuple[int, TokenLogprobs]]
PromptTokens = Sequence[tuple[int, TokenLogprobs | None]]


def for_chat(tokens: SampledTokens, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    content = [
        entry(token, logprobs.sampled) | {"top_logprobs": [entry(*likely) for likely in logprobs.top]}
        for token, logprobs in tokens
    ]
    return {"content": content, "refusal": None}


def for_completion(tokens: PromptTokens, tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """`offset` is where the first of these tokens begins in the text. Of a prompt's first token nothing is known."""
    words, offsets = [], []
    for token, _ in tokens:
        word = _word(token, tokenizer)
        words.append(word)
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": words,
        "token_logprobs": [logprobs and max(logprobs.sampled, _LOWEST) for _, logprobs in tokens],
        "top_logprobs": [logprobs and _likeliest(token, logprobs, tokenizer) for token, logprobs in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Of tokens that are written alike, the likeliest counts."""
    ascending = ((token, logprobs.sampled), *reversed(logprobs.top))
    return {_word(each, tokenizer): max(logprob, _LOWEST) for each, logprob in ascending}


def told_of_prompt(
    prompt: Sequence[int], found: PromptLogprobs, likeliest: int
) -> list[tuple[int, TokenLogprobs | None]]:
    """Each token of a prompt with what is known of it, and at most so many of the likeliest in its place."""
    cut = (TokenLogprobs(each.sampled, each.top[:likeliest], each.rank) for each in found)
    return list(zip(prompt, (None, *cut), strict=True))


def of_prompt(
    prompt: Sequence[int], found: PromptLogprobs | None, likeliest: int | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM writes them: by token id, the likeliest and the token itself."""
    if found is None or likeliest is None:
        return None

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": _word(token, tokenizer)}

    def entries(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        likeliest = {str(each): entry(each, logprob, rank) for rank, (each, logprob) in enumerate(logprobs.top, 1)}
        return {str(token): entry(token, logprobs.sampled, logprobs.rank)} | likeliest

    told = told_of_prompt(prompt, found, likeliest)
    return [None if each is None else entries(token, each) for token, each in told]


def _word(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
