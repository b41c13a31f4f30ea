"""Prompts have the lengths asked for, are the same for the same seed, and share exactly what they should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from phalanx.bench.serving.client import Query
from phalanx.bench.serving.datasets import WORDS, make_workload
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.workload import QuerySet
from phalanx.errors import ConfigError


@dataclass
class SilentServer:
    """Tokenises if it is given a way to."""

    max_model_len: int | None = None
    tokens_of: Callable[[str], list[int]] = field(default=lambda text: [])

    async def tokenize(self, text: str) -> list[int] | None:
        return self.tokens_of(text) or None


def workload(server: SilentServer | None = None, **flags: Any) -> QuerySet:
    return asyncio.run(make_workload(Options(**flags), server or SilentServer()))  # type: ignore[arg-type]


def prompts(queries: list[Query]) -> list[Any]:
    return [msgspec.json.decode(query.prompt) for query in queries]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words w0 to w99, of which w7 is special."""
    raw = RawTokenizer(WordLevel({f"w{index}": index for index in range(100)}, unk_token="w0"))
    raw.pre_tokenizer = Whitespace()
    raw.add_special_tokens([AddedToken("w7", special=True)])
    raw.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_random_prompts_are_token_ids_of_the_length_asked_for() -> None:
    made = workload(num_prompts=5, input_len=40, output_len=9, vocab_size=12)
    assert len(made.queries) == 5
    for query, ids in zip(made.queries, prompts(made.queries), strict=True):
        assert len(ids) == query.prompt_tokens == 40
        assert query.max_tokens == 9
        assert query.agent is None
    assert {token for ids in prompts(made.queries) for token in ids} == set(range(12))
    assert len(set(map(tuple, prompts(made.queries)))) == 5


def test_lengths_are_uniform_between_a_share_of_them_and_all() -> None:
    made = workload(num_prompts=3000, input_len=10, output_len=21, range_ratio=0.75, vocab_size=2)
    inputs = [query.prompt_tokens for query in made.queries]
    assert [len(ids) for ids in prompts(made.queries)] == inputs
    assert set(inputs) == {8, 9, 10}
    assert {query.max_tokens for query in made.queries} == set(range(16, 22))
    for length in (8, 9, 10):
        assert inputs.count(length) / 3000 == pytest.approx(1 / 3, abs=0.04)


@pytest.mark.parametrize("dataset", ["random", "shared-prefix"])
def test_the_seed_decides_and_the_warm_up_does_not(dataset: str) -> None:
    flags = {"dataset": dataset, "num_prompts": 8, "input_len": 30, "vocab_size": 1000, "range_ratio": 0.5}
    first, again = workload(seed=1, **flags), workload(seed=1, warmup=3, **flags)
    assert prompts(first.queries) == prompts(again.queries)
    assert prompts(first.queries) != prompts(workload(seed=2, **flags).queries)
    assert len(again.warmup) == 3


def test_the_vocabulary_comes_from_the_tokenizer_without_special_tokens(tokenizer: Path) -> None:
    made = workload(tokenizer=tokenizer, num_prompts=10, input_len=400)
    assert {token for ids in prompts(made.queries) for token in ids} == set(range(100)) - {7}
    assert "99 without special ones" in made.notes[0]


def test_or_from_the_server_or_a_safe_guess_that_is_told() -> None:
    probed = workload(SilentServer(tokens_of=lambda text: [3, 76, 12]), num_prompts=10, input_len=400)
    assert {token for ids in prompts(probed.queries) for token in ids} == set(range(77))
    assert "/tokenize" in probed.notes[0]
    guessed = workload(num_prompts=10, input_len=4000)
    assert max(token for ids in prompts(guessed.queries) for token in ids) in range(9_900, 10_000)
    assert "does not tell its vocabulary" in guessed.notes[0]


def test_what_cannot_fit_the_server_is_refused() -> None:
    flags = {"dataset": "shared-prefix", "prefix_len": 50, "input_len": 30, "output_len": 20, "vocab_size": 9}
    assert workload(SilentServer(max_model_len=100), **flags).queries
    with pytest.raises(ConfigError, match="up to 100 tokens, prompt and answer, exceed the server's max_model_len 99"):
        workload(SilentServer(max_model_len=99), **flags)


def test_agents_share_one_prefix_and_nothing_else() -> None:
    made = workload(
        dataset="shared-prefix", prefix_len=20, agents=3, num_prompts=7, warmup=2, input_len=16, vocab_size=5000
    )
    found = prompts(made.queries)
    assert len({tuple(ids[:20]) for ids in found}) == 1
    assert len({tuple(ids[20:]) for ids in found}) == 7
    assert all(len(ids) == query.prompt_tokens == 36 for ids, query in zip(found, made.queries, strict=True))
    assert [query.agent for query in made.queries] == [0, 1, 2, 0, 1, 2, 0]
    assert {tuple(ids[:20]) for ids in prompts(made.warmup)}.isdisjoint({tuple(found[0][:20])})


def test_a_chat_has_words_and_the_prefix_is_the_system_prompt() -> None:
    made = workload(dataset="shared-prefix", endpoint="chat", prefix_len=20, agents=2, num_prompts=4, input_len=16)
    found = prompts(made.queries)
    assert [[message["role"] for message in messages] for messages in found] == [["system", "user"]] * 4
    assert len({messages[0]["content"] for messages in found}) == 1
    assert len({messages[1]["content"] for messages in found}) == 4
    assert [len(message["content"].split()) for message in found[0]] == [20, 16]
    (message,) = prompts(workload(endpoint="chat", num_prompts=1, input_len=16).queries)[0]
    assert message["role"] == "user"
    assert set(message["content"].split()) <= set(WORDS.split())


def turns(*said: tuple[str, int]) -> dict[str, Any]:
    """Who says how many words."""
    return {"id": "x", "conversations": [{"from": who, "value": " ".join(["w1"] * words)} for who, words in said]}


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """One question of 5 words with 6 in answer, one of 8 with 9; the others do not fit."""
    file = tmp_path / "sharegpt.json"
    items = [
        turns(("human", 5), ("gpt", 6), ("human", 50), ("gpt", 60)),
        turns(("system", 70), ("gpt", 30), ("human", 8), ("gpt", 9)),
        turns(("human", 3), ("gpt", 20)),
        turns(("human", 20), ("gpt", 3)),
        turns(("human", 1025), ("gpt", 20)),
        turns(("human", 1000), ("gpt", 1049)),
        turns(("human", 9)),
        turns(),
        {"id": "y"},
    ]
    file.write_text(json.dumps(items))
    return file


def shape(queries: list[Query]) -> set[tuple[int, int, int]]:
    return {
        (len(prompt.split()), query.prompt_tokens, query.max_tokens)
        for query, prompt in zip(queries, prompts(queries), strict=True)
    }


def test_sharegpt_takes_first_questions_and_the_length_of_their_answers(conversations: Path, tokenizer: Path) -> None:
    flags: dict[str, Any] = {"dataset": "sharegpt", "dataset_path": conversations, "tokenizer": tokenizer}
    made = workload(num_prompts=2, **flags)
    assert shape(made.queries) == {(5, 5, 6), (8, 8, 9)}
    assert "Of 6 conversations 2 were too short" in made.notes[0]
    assert "2 too long (question over 1024, or 2048 in all), by the tokenizer of" in made.notes[0]
    longer = workload(num_prompts=3, output_len=77, **flags)
    assert shape(longer.queries) == {(5, 5, 77), (8, 8, 77), (1000, 1000, 77)}
    split = workload(num_prompts=1, warmup=1, **flags)
    assert shape(split.queries) | shape(split.warmup) == {(5, 5, 6), (8, 8, 9)}
    (message,) = prompts(workload(num_prompts=1, endpoint="chat", **flags).queries)[0]
    assert message["role"] == "user"


def test_sharegpt_without_a_tokenizer_counts_by_the_server_or_by_characters(conversations: Path) -> None:
    flags: dict[str, Any] = {"dataset": "sharegpt", "dataset_path": conversations, "num_prompts": 2}
    counted = workload(SilentServer(tokens_of=lambda text: [1] * len(text.split())), **flags)
    assert shape(counted.queries) == {(5, 5, 6), (8, 8, 9)}
    assert "by the server's /tokenize" in counted.notes[0]
    estimated = workload(**flags | {"num_prompts": 4})
    assert shape(estimated.queries) == {(5, 4, 5), (8, 6, 7), (1025, 769, 15), (1000, 750, 787)}
    assert "4 characters a token" in estimated.notes[0]


def test_sharegpt_heeds_the_servers_room(conversations: Path, tokenizer: Path) -> None:
    flags: dict[str, Any] = {"dataset": "sharegpt", "dataset_path": conversations, "tokenizer": tokenizer}
    made = workload(SilentServer(max_model_len=16), num_prompts=1, **flags)
    assert shape(made.queries) == {(5, 5, 6)}
    with pytest.raises(ConfigError, match="2 are needed"):
        workload(SilentServer(max_model_len=16), num_prompts=2, **flags)


def test_the_seed_shuffles_conversations(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "many.json"
    file.write_text(json.dumps([turns(("human", 4 + index), ("gpt", 4)) for index in range(200)]))
    flags: dict[str, Any] = {"dataset": "sharegpt", "dataset_path": file, "tokenizer": tokenizer, "num_prompts": 150}
    first, again, other = (
        [query.prompt_tokens for query in workload(seed=seed, **flags).queries] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 150


@pytest.mark.parametrize("content", ["[", '{"a": 1}', '[{"conversations": [{"from": 1}]}]', None])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="A ShareGPT file is"):
        workload(dataset="sharegpt", dataset_path=file)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        workload(tokenizer=tmp_path)
