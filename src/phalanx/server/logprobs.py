"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.engine.step_plan import TokenLogprobs
from phalanx.text.tokenizer import Tokenizer

_LOWEST = -9999.0

SampledTokens = Sequence[tuple[int, TokenLogprobs]]


def for_chat(tokens: SampledTokens, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    content = [
        entry(token, logprobs.sampled) | {"top_logprobs": [entry(*likely) for likely in logprobs.top]}
        for token, logprobs in tokens
    ]
    return {"content": content, "refusal": None}


def for_completion(tokens: SampledTokens, tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """`offset` is where the first of these tokens begins in the text."""
    words, offsets = [], []
    for token, _ in tokens:
        word = _word(token, tokenizer)
        words.append(word)
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": words,
        "token_logprobs": [max(logprobs.sampled, _LOWEST) for _, logprobs in tokens],
        "top_logprobs": [
            {
                _word(each, tokenizer): max(logprob, _LOWEST)
                for each, logprob in ((token, logprobs.sampled), *logprobs.top)
            }
            for token, logprobs in tokens
        ],
        "text_offset": offsets,
    }


def _word(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
