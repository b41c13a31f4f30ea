"""Answers under a grammar: what the grammar allows and nothing else, at any TP size and in any company."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from jsonschema import Draft202012Validator

from phalanx import LLM, SamplingParams
from phalanx.engine.request import Request
from phalanx.errors import RequestError
from phalanx.runtime.sampler import Sampler
from phalanx.server.grammar import matcher as module
from phalanx.server.grammar.constraint import Constraint, to_xgrammar
from phalanx.server.grammar.matcher import GrammarMatcher, Grammars
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import locate
from tests.byte_model import (
    EOS,
    HALF,
    TOKENS,
    UNSEEN,
    VOCAB,
    allowed_tokens,
    make_grammars,
    make_tokenizer,
    random_text,
    with_byte_tokenizer,
)
from tests.runtime.seats import Seat, seated

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "mood", "when"],
}
DATE = r"(\d{4}|today)-[a-f]{2}"
CHOICES = ["yes", "yes and no", 'n"o']
CONSTRAINTS = {
    "schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "regex": Constraint("regex", DATE),
    "choice": Constraint("choice", json.dumps(CHOICES)),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_byte_tokenizer(tiny_llama, tmp_path_factory.mktemp("byte_model") / "model")


def matcher_of(grammars: Grammars, kind: Any, source: str = "") -> GrammarMatcher:
    return grammars.matcher(grammars.pack(to_xgrammar(Constraint(kind, source))))


def follow(matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    """Byte by byte."""
    for byte in text.encode():
        matcher.accept(byte)
    return matcher


def next_bytes(matcher: GrammarMatcher) -> set[str]:
    return {TOKENS[token].decode() for token in allowed_tokens(matcher.mask()) if token < 128}


@pytest.mark.parametrize("said", ["", "y", "yes", 'n"'])
def test_a_mask_holds_every_token_that_can_follow_and_no_other(grammars: Grammars, said: str) -> None:
    choices = [choice for choice in CHOICES if choice.startswith(said)]
    matcher = follow(matcher_of(grammars, "choice", json.dumps(CHOICES)), said)
    ends = [EOS] if said in CHOICES else []
    words = [token for token, piece in enumerate(TOKENS) if token not in (EOS, UNSEEN)]
    fitting = [t for t in words if any(choice.encode().startswith(said.encode() + TOKENS[t]) for choice in choices)]
    assert allowed_tokens(matcher.mask()) == fitting + ends


def test_a_mask_has_a_bit_for_every_row_of_the_logits(grammars: Grammars) -> None:
    assert len(matcher_of(grammars, "json_object").mask()) == VOCAB // 8
    odd = Grammars(Tokenizer(make_tokenizer()), VOCAB + 1, [EOS])
    assert len(matcher_of(odd, "json_object").mask()) == VOCAB // 8 + 4


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    """A JSON string may hold anything, but not what the client would not see; tags that he sees are text."""
    allowed = allowed_tokens(follow(matcher_of(grammars, "json_object"), '{"').mask())
    assert UNSEEN not in allowed
    assert TOKENS.index(HALF) not in allowed
    assert EOS not in allowed
    assert TOKENS.index(b"</think>") in allowed
    assert max(allowed) < len(TOKENS)


def test_a_text_that_can_grow_is_not_finished_until_its_end(grammars: Grammars) -> None:
    matcher = follow(matcher_of(grammars, "choice", json.dumps(CHOICES)), "yes")
    assert not matcher.finished
    matcher.accept(EOS)
    assert matcher.finished


def test_a_text_that_cannot_grow_is_finished_without_its_end(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, "choice", json.dumps(CHOICES))
    assert not follow(matcher, "yes and n").finished
    assert follow(matcher, "o").finished


def test_nothing_to_say_is_said_by_the_end(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, "choice", '[""]')
    assert allowed_tokens(matcher.mask()) == [EOS]


def test_without_an_end_token_a_text_ends_where_it_cannot_grow() -> None:
    endless = Grammars(Tokenizer(make_tokenizer()), VOCAB, [])
    matcher = matcher_of(endless, "choice", json.dumps(CHOICES))
    assert not follow(matcher, "yes").finished
    assert follow(matcher, " and no").finished
    with pytest.raises(RequestError, match="no token of this model can follow"):
        matcher_of(endless, "choice", '[""]')


def test_every_matcher_goes_its_own_way(grammars: Grammars) -> None:
    packed = grammars.pack(to_xgrammar(CONSTRAINTS["regex"]))
    first, second = grammars.matcher(packed), grammars.matcher(packed)
    follow(first, "today-")
    assert next_bytes(first) == set("abcdef")
    assert next_bytes(second) == set("t0123456789")


def test_a_token_that_is_not_allowed_is_an_error_of_this_request(grammars: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        matcher_of(grammars, "regex", "a").accept(ord("b"))
    assert caught.value.code == "grammar_violated"


def test_a_dead_end_is_an_error_of_this_request(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, "grammar", 'root ::= "ab" x | "ay"\nx ::= x "c"')
    with pytest.raises(RequestError) as caught:
        follow(matcher, "ab")
    assert caught.value.code == "grammar_dead_end"


def test_a_grammar_that_takes_too_long_gives_up(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = matcher_of(grammars, "grammar", 'root ::= (("a"*)*)*')
    with pytest.raises(RequestError) as caught:
        follow(matcher, "a" * 400)
    assert caught.value.code == "grammar_too_complex"


def test_what_drafts_take_ends_drafts_and_no_answer(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUDGET_S", 0.02)
    matcher = matcher_of(grammars, "grammar", 'root ::= (("a"*)*)*')
    drafts = list(b"aaaaaaaa")
    assert len(matcher.masks(drafts)) == 1 + len(drafts)
    assert any(len(matcher.masks(drafts)) == 1 for _ in range(10_000))
    assert matcher._left_s == module._BUDGET_S
    follow(matcher, "a")


def test_time_that_tokens_bring_with_them_is_enough_for_long_answers(grammars: Grammars) -> None:
    matcher = follow(matcher_of(grammars, "json_object"), '{"' + "a" * 3000)
    assert matcher._left_s > module._BUDGET_S


def test_bytes_that_are_no_utf8_never_come_together(grammars: Grammars) -> None:
    rng = random.Random(0)
    for _ in range(300):
        matcher, text = matcher_of(grammars, "regex", "[^a]{1,4}"), b""
        while not matcher.finished:
            tokens = allowed_tokens(matcher.mask())
            token = rng.choice([token for token in tokens if 128 <= token < 256] or tokens)
            matcher.accept(token)
            text += TOKENS[token] if token != EOS else b""
        assert 1 <= len(text.decode()) <= 4


def test_the_cache_keeps_the_last_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars()
    packed = [grammars.pack(to_xgrammar(Constraint("regex", letter * 3))) for letter in "abc"]
    assert list(grammars._kept) == packed
    grammars.matcher(packed[0])
    monkeypatch.setattr(module, "_CACHE_BYTES", 2 * grammars._kept[packed[0]].memory_size_bytes)
    newest = grammars.pack(to_xgrammar(Constraint("regex", "ddd")))
    assert list(grammars._kept) == [packed[0], newest]
    assert next_bytes(grammars.matcher(packed[1])) == {"b"}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_travels_compiled_is_the_same_grammar(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long to compile is compiled once, and masks are the same at every step."""
    as_tag, compiled = make_grammars(), make_grammars()
    tag = to_xgrammar(CONSTRAINTS[name])
    packed_tag = as_tag.pack(tag)
    monkeypatch.setattr(module, "_QUICK_S", 0.0)
    packed = compiled.pack(tag)
    assert packed != packed_tag
    rng = random.Random(1)
    for _ in range(20):
        one, other = as_tag.matcher(packed_tag), compiled.matcher(packed)
        while not one.finished:
            assert one.mask() == other.mask()
            token = rng.choice(allowed_tokens(one.mask()))
            one.accept(token)
            other.accept(token)
        assert other.finished
    monkeypatch.setattr(module, "_MOST_BYTES", 100)
    with pytest.raises(RequestError, match="bytes when compiled"):
        compiled.pack(tag)


def a_row(mask: bytes | None, position: int = 1, **params: Any) -> Seat:
    return Seat(SamplingParams(**params), position, mask=mask)


def mask_of(*tokens: int, size: int = 64) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(size // 8, "little")


def sample(logits: torch.Tensor, seats: list[Seat]) -> Any:
    batch, rows = seated(seats)
    return Sampler([3])(logits.clone(), rows, batch)


@pytest.mark.parametrize("vocab", [64, 50, 96])
def test_masks_are_applied_as_xgrammar_does(vocab: int) -> None:
    """To the rows that have one; tokens beyond the mask are never allowed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, vocab, generator=generator)
    logits[:, 64:] += 100.0
    bits = torch.randint(-(2**31), 2**31, (5, 2), generator=generator, dtype=torch.int32)
    masked = [0, 3, 4]
    rows = [a_row(bits[row].numpy().tobytes() if row in masked else None, temperature=0) for row in range(5)]
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, bits, indices=masked, vocab_size=min(vocab, 64))
    expected[masked, 64:] = float("-inf")
    assert torch.equal(sample(logits, rows).tokens, expected.argmax(-1))


def test_random_tokens_are_allowed_ones_as_often_as_the_model_would_have_them() -> None:
    logits = torch.zeros(1000, 64)
    logits[:, 9] = 1.0
    rows = [a_row(mask_of(5, 9), position=position, temperature=1.0) for position in range(1, 1001)]
    tokens = sample(logits, rows).tokens.tolist()
    assert set(tokens) == {5, 9}
    assert 0.69 < tokens.count(9) / 1000 < 0.77, "1 / (1 + 1/e) is 0.73"


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"repetition_penalty": 9.0}])
def test_cuts_are_made_among_the_allowed(extra: dict[str, Any]) -> None:
    logits = torch.arange(64.0)[None]
    assert sample(logits, [a_row(mask_of(5, 9), **extra)]).tokens.tolist() == [9]


def test_a_bias_cannot_leave_the_grammar() -> None:
    bias = dict.fromkeys(range(10, 64), 100.0) | {9: -100.0, 5: -100.0}
    assert sample(torch.arange(64.0)[None], [a_row(mask_of(5, 9), logit_bias=bias)]).tokens.tolist() == [9]


def test_an_end_is_held_back_while_the_grammar_allows_something_else() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 3] = 9.0
    waiting = {"min_tokens": 5, "max_tokens": 9, "temperature": 0.0}
    assert sample(logits, [a_row(mask_of(3, 8), **waiting)]).tokens.tolist() == [8]
    assert sample(logits, [a_row(mask_of(3), **waiting)]).tokens.tolist() == [3], "the grammar wins"
    stop = {"stop_token_ids": [8], "ignore_eos": True}
    assert sample(logits, [a_row(mask_of(8), **waiting, **stop)]).tokens.tolist() == [8]
    assert sample(logits, [a_row(mask_of(3, 8), **waiting, **stop)]).tokens.tolist() == [3]


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    seats = [a_row(mask_of(5), logprobs=2, temperature=0), a_row(None, logprobs=2, temperature=0)]
    tokens, logprobs = sample(logits, seats).read(seated(seats)[1])
    raw = logits.log_softmax(-1)
    assert tokens[0] == 5
    for row in range(2):
        found = logprobs[row]
        assert found is not None
        assert found.sampled == pytest.approx(float(raw[row, tokens[row]]))
        assert [token for token, _ in found.top] == raw[row].topk(2).indices.tolist()


def test_a_row_under_a_grammar_is_not_plain() -> None:
    _, rows = seated([a_row(None), a_row(mask_of(1))])
    assert [row.index for row in rows.special] == [1]


def answer(llm: LLM, requests: list[Request]) -> list[str]:
    """Run to the end; the texts without their ends."""
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.tokenizer is not None
    return [llm.tokenizer.decode(request.output) for request in requests]


def check(name: str, text: str) -> None:
    if name == "schema":
        Draft202012Validator(SCHEMA).validate(json.loads(text))
    elif name == "regex":
        assert re.fullmatch(DATE, text)
    else:
        assert text in CHOICES


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_answers_fit_their_grammars_beside_free_ones(
    folder: Path, grammars: Grammars, tp: int, depth: int
) -> None:
    """Hot and random, under preemption, in chunks, in one batch with greedy neighbours whom it does not touch."""
    tight = {"max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 40, "max_model_len": 256, "max_num_seqs": 8}
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[index] * (5 + 7 * index) for index in range(1, 4)]
    with LLM(folder, tp=tp, progress=False, **tight) as llm:
        llm.engine.runner.depth = depth
        alone = [llm.engine.add(prompt, greedy, "alone") for prompt in prompts]
        answer(llm, alone)
        constrained, beside = [], []
        for round_ in range(4):
            for name, constraint in CONSTRAINTS.items():
                hot = SamplingParams(temperature=1.5, max_tokens=200, seed=round_)
                matcher = grammars.matcher(grammars.pack(to_xgrammar(constraint)))
                constrained.append((name, llm.engine.add([7, round_, 9], hot, matcher=matcher)))
            beside += [llm.engine.add(prompt, greedy) for prompt in prompts]
        answer(llm, beside)
        for name, request in constrained:
            assert request.finish_reason == "stop"
            assert llm.tokenizer is not None
            check(name, llm.tokenizer.decode(request.output))
        assert [request.output for request in beside] == [request.output for request in alone] * 4
        assert sum(request.preemptions for _, request in constrained) > 0
        assert len({tuple(request.output) for name, request in constrained if name == "schema"}) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_seeded_answer_is_the_same_whatever_else_happens(folder: Path, grammars: Grammars, depth: int) -> None:
    """Alone, or preempted and computed again, a request under a grammar gets the same tokens at any depth."""
    hot = SamplingParams(temperature=1.5, max_tokens=200, seed=3)
    packed = grammars.pack(to_xgrammar(CONSTRAINTS["schema"]))
    answers = []
    for blocks, company in ((64, 0), (40, 6)):
        with LLM(folder, progress=False, block_size=8, num_blocks=blocks, max_model_len=256) as llm:
            llm.engine.runner.depth = depth
            free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            for index in range(company):
                llm.engine.add([index + 1] * 20, free)
            request = llm.engine.add([5, 6, 7], hot, matcher=grammars.matcher(packed))
            answer(llm, [request])
            answers.append(request.output)
            assert (request.preemptions > 0) == (company > 0)
    assert answers[0] == answers[1]


def test_a_mask_finds_its_row_behind_one_that_yields_nothing(folder: Path, grammars: Grammars) -> None:
    """Five tokens of a prompt under a grammar, and in the same step one of a longer prompt, which comes first."""
    with LLM(folder, progress=False, max_num_batched_tokens=6, prefix_caching=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=30)
        request = llm.engine.add([1, 2, 3, 4, 5], params, matcher=matcher_of(grammars, "regex", "[xyz]{9}"))
        llm.engine.add(list(range(1, 40)), params)
        assert re.fullmatch("[xyz]{9}", answer(llm, [request])[0])


def test_an_end_may_come_where_the_grammar_allows_it_and_ends_even_what_ignores_it(
    folder: Path, grammars: Grammars
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={EOS: 100.0})
    with LLM(folder, progress=False) as llm:
        early = llm.engine.add([1], params, matcher=matcher_of(grammars, "regex", "a{2,9}"))
        held = llm.engine.add([1], params, matcher=matcher_of(grammars, "regex", "a{2,9}"))
        held.params = SamplingParams(temperature=0, max_tokens=30, min_tokens=20, logit_bias={EOS: 100.0})
        assert answer(llm, [early, held]) == ["aa", "a" * 9]
    assert (early.output[-1], early.finish_reason) == (EOS, "stop")
    assert (held.output[-1] != EOS, held.finish_reason) == (True, "stop")


def test_the_default_model_answers_in_json() -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "country": {"const": "France"}},
        "required": ["capital", "country"],
    }
    with LLM(progress=False, max_model_len=256) as llm:
        assert llm.tokenizer is not None
        spec = llm.engine.scheduler
        grammars = Grammars(llm.tokenizer, llm.engine.vocab, sorted(spec.eos_token_ids))
        prompt = llm.encode_chat([{"role": "user", "content": "What is the capital of France? Answer in JSON."}])
        matcher = matcher_of(grammars, "json_schema", json.dumps(schema))
        request = llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=80), matcher=matcher)
        (text,) = answer(llm, [request])
    assert request.finish_reason == "stop"
    Draft202012Validator(schema).validate(json.loads(text))
    assert json.loads(text)["capital"] == "Paris"


def test_masks_of_a_real_vocabulary_are_exact() -> None:
    """Of 49,152 tokens those may follow that xgrammar accepts when asked one by one."""
    tokenizer = Tokenizer.load(locate(None))
    assert tokenizer is not None
    grammars = Grammars(tokenizer, 49152, [2])
    matcher = matcher_of(grammars, "choice", json.dumps(["Hello world", "Help"]))
    pieces = {tokenizer.decode([token]): token for token in allowed_tokens(matcher.mask())}
    assert {"Hello", "Hel", "H", "Help"} <= set(pieces)
    assert all("Hello world".startswith(piece) or "Help".startswith(piece) for piece in pieces)


def test_random_texts_come_to_an_end(grammars: Grammars) -> None:
    text = random_text(matcher_of(grammars, "json_schema", json.dumps(SCHEMA)), random.Random(0))
    assert text is not None
    check("schema", text.decode())
