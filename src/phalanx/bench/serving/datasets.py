"""The datasets: random prompts, with or without a shared prefix, and conversations."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from phalanx.bench.serving import sharegpt
from phalanx.bench.serving.client import Client, Query
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.workload import PROBE, QuerySet, in_json, load_tokenizer
from phalanx.errors import ConfigError

# Each is one token, with the blank before it, in the vocabularies in use.
WORDS = """time people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work night point home water room mother area money story fact month
lot right study book eye job word business issue side kind head house service friend father power hour game line"""

_FALLBACK_VOCABULARY = 10_000


async def make_workload(options: Options, client: Client) -> QuerySet:
    """The same options make the same workload."""
    if options.dataset == "sharegpt":
        return await sharegpt.sample(options, client)
    return await _random(options, client)


async def _random(options: Options, client: Client) -> QuerySet:
    """Random prompts, after a prefix they share if the dataset is `shared-prefix`."""
    shared = options.dataset == "shared-prefix"
    prefix_len = options.prefix_len if shared else 0
    _check_room(prefix_len + options.input_len + options.answer_len, client.max_model_len)
    symbols, note = await _symbols(options, client)
    rng = np.random.default_rng(options.seed)

    def make(count: int) -> list[Query]:
        prefix = rng.choice(symbols, prefix_len).tolist()
        inputs = _lengths(rng, options.input_len, options.range_ratio, count)
        outputs = _lengths(rng, options.answer_len, options.range_ratio, count)
        prompts = [_prompt(options, prefix, rng.choice(symbols, length).tolist()) for length in inputs]
        return [
            Query(prompt, prefix_len + length, output, agent=index % options.agents if shared else None)
            for index, (prompt, length, output) in enumerate(zip(prompts, inputs, outputs, strict=True))
        ]

    return QuerySet(make(options.requests), make(options.warmup), [note])


def _lengths(rng: np.random.Generator, longest: int, ratio: float, count: int) -> list[int]:
    """Uniform from `ratio` of the longest up to the longest."""
    return rng.integers(math.ceil(ratio * longest), longest, size=count, endpoint=True).tolist()


def _prompt(options: Options, prefix: list[Any], own: list[Any]) -> msgspec.Raw:
    """Token ids as they are; words as a user's message, after the prefix as the system's."""
    if options.endpoint == "completions":
        return in_json(prefix + own)
    system = [{"role": "system", "content": " ".join(prefix)}] if prefix else []
    return in_json([*system, {"role": "user", "content": " ".join(own)}])


async def _symbols(options: Options, client: Client) -> tuple[np.ndarray, str]:
    """What prompts are made of (token ids, or words of a token each), and where that is known from."""
    if options.endpoint == "chat":
        return np.array(WORDS.split()), "Prompts are random words; a chat template adds its own tokens."
    if options.vocab_size is not None:
        return np.arange(options.vocab_size), f"Prompts are random token ids below {options.vocab_size} (--vocab-size)."
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = sorted(set(tokenizer.get_vocab().values()) - special)
        return np.array(ids), f"Prompts are random token ids of {options.tokenizer}, {len(ids)} without special ones."
    if tokens := await client.tokenize(PROBE):
        size = max(tokens) + 1
        return np.arange(size), f"Prompts are random token ids below {size}, as far as a probe of /tokenize reached."
    return np.arange(_FALLBACK_VOCABULARY), (
        f"Prompts are random token ids below {_FALLBACK_VOCABULARY}: the server does not tell its vocabulary."
        " Give --vocab-size or --tokenizer for all of it."
    )


def _check_room(tokens: int, limit: int | None) -> None:
    if limit is not None and tokens > limit:
        raise ConfigError(
            "too_long",
            f"Requests of up to {tokens} tokens, prompt and answer, exceed the server's max_model_len {limit}.",
            "Lower --input-len, --output-len or --prefix-len.",
        )
