"""Real conversations: how people's questions and a model's answers are distributed in length."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from phalanx.bench.serving.client import Client, Query
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.workload import PROBE, QuerySet, in_json, load_tokenizer
from phalanx.errors import ConfigError

CountTokens = Callable[[list[str]], Awaitable[list[int]]]

_SHORTEST = 4
_LONGEST_PROMPT = 1024
_LONGEST = 2048
_BATCH = 64
_CHARACTERS_A_TOKEN = 4
_SHAPE = 'A ShareGPT file is [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}].'


class _Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []

    def exchange(self) -> tuple[str, str] | None:
        """The first question and the first answer to it."""
        turns = iter(self.conversations)
        question = next((turn.value for turn in turns if turn.speaker == "human"), None)
        answer = next((turn.value for turn in turns if turn.speaker == "gpt"), None)
        return None if question is None or answer is None else (question, answer)


async def sample(options: Options, client: Client) -> QuerySet:
    """Conversations in random order, those too short or too long left out, until there are as many as needed."""
    exchanges = _exchanges(options)
    count_tokens, source = await _counter(options, client)
    needed, room = options.requests + options.warmup, client.max_model_len or _LONGEST
    queries: list[Query] = []
    short = long = 0
    for start in range(0, len(exchanges), _BATCH):
        batch = exchanges[start : start + _BATCH]
        counts = await count_tokens([text for exchange in batch for text in exchange])
        for (question, _), asked, answered in zip(batch, counts[::2], counts[1::2], strict=True):
            output = options.output_len or answered
            if asked < _SHORTEST or answered < _SHORTEST:
                short += 1
            elif asked > _LONGEST_PROMPT or asked + output > min(_LONGEST, room):
                long += 1
            else:
                queries.append(Query(_prompt(options, question), asked, output))
        if len(queries) >= needed:
            break
    note = (
        f"Of {short + long + len(queries)} conversations {short} were too short (question or answer under {_SHORTEST}"
        f" tokens), {long} too long (question over {_LONGEST_PROMPT}, or {min(_LONGEST, room)} in all), by {source}."
    )
    if len(queries) < needed:
        raise ConfigError("short_dataset", f"{note} {needed} are needed.", "Lower --num-prompts or --warmup.")
    return QuerySet(queries[: options.requests], queries[options.requests : needed], [note])


def _exchanges(options: Options) -> list[tuple[str, str]]:
    """Of every conversation that has one, shuffled by the seed."""
    found = [exchange for item in _read(options.dataset_path or Path()) if (exchange := item.exchange()) is not None]
    return [found[index] for index in np.random.default_rng(options.seed).permutation(len(found))]


def _read(path: Path) -> list[_Conversation]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise ConfigError("bad_dataset", f"{path} cannot be read: {error.strerror}.", _SHAPE) from None
    except msgspec.DecodeError as error:
        raise ConfigError("bad_dataset", f"{path} is no ShareGPT file: {error}.", _SHAPE) from None


def _prompt(options: Options, question: str) -> msgspec.Raw:
    return in_json(question if options.endpoint == "completions" else [{"role": "user", "content": question}])


async def _counter(options: Options, client: Client) -> tuple[CountTokens, str]:
    """How the tokens of texts are counted, and its name."""
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)

        async def by_tokenizer(texts: list[str]) -> list[int]:
            return [len(encoding) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

        return by_tokenizer, f"the tokenizer of {options.tokenizer}"
    if await client.tokenize(PROBE):

        async def by_server(texts: list[str]) -> list[int]:
            return [len(tokens or ()) for tokens in await asyncio.gather(*map(client.tokenize, texts))]

        return by_server, "the server's /tokenize"

    async def by_characters(texts: list[str]) -> list[int]:
        return [math.ceil(len(text) / _CHARACTERS_A_TOKEN) for text in texts]

    return by_characters, f"an estimate of {_CHARACTERS_A_TOKEN} characters a token"
