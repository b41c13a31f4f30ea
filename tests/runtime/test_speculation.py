"""Drafts change no token and no log-probability, whoever makes them and however many of them come true."""

from __future__ import annotations

from random import Random

import pytest

from phalanx.engine.ngram import NgramDrafter
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.speculation import Speculation
from tests.conftest import Reference
from tests.threaded_ranks import ThreadedEngine

NEW_TOKENS = 20
WAYS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 0.7, "top_k": 20, "logit_bias": {3: 2.0}, "min_tokens": 9},
]


class Rememberer:
    """Knows the answers, and is wrong as often as it is told to be."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: float) -> None:
        self._answers, self._right, self._random = answers, right, Random(5)

    def propose(self, request: Request, most: int) -> list[int]:
        answer = self._answers[tuple(request.tokens[: request.prompt_length])]
        done = len(request.tokens) - request.prompt_length
        rightly = [token if self._random.random() < self._right else token ^ 1 for token in answer[done:]]
        return rightly[: self._random.randint(1, most)]

    def forget(self, request: Request) -> None:
        pass


def answers_of(threaded: ThreadedEngine, prompts: list[list[int]]) -> list[tuple[list[int], list[float | None]]]:
    engine = threaded.engine
    requests = [
        engine.add(
            prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=31 + index, **WAYS[index % len(WAYS)])
        )  # type: ignore[arg-type]
        for index, prompt in enumerate(prompts)
    ]
    scores: dict[int, list[float | None]] = {request.id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            scores[output.request_id].append(output.logprobs and output.logprobs.sampled)
    return [(request.output, scores[request.id]) for request in requests]


def check_same_answers(reference: Reference, tp: int, rights: list[float]) -> None:
    """Under pressure: in chunks, with cached prefixes and preemption."""
    threaded = ThreadedEngine(reference.folder, tp, speculate="ngram", max_num_seqs=24)
    scheduler = threaded.engine.scheduler
    scheduler.speculation = None
    plain = answers_of(threaded, reference.prompts)
    known = {tuple(prompt): answer for prompt, (answer, _) in zip(reference.prompts, plain, strict=True)}
    for right in rights:
        scheduler.speculation = speculation = Speculation(Rememberer(known, right), most=1 + int(right * 7))
        speculation._line.share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        found = answers_of(threaded, reference.prompts)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        for (_, told), (_, wanted) in zip(found, plain, strict=True):
            assert told == [score if score is None else pytest.approx(score, abs=1e-4) for score in wanted]
        totals = speculation.totals
        assert totals.drafts > 10
        assert (totals.accepted_tokens > 0) == (right > 0)
        assert (totals.accepted_tokens == totals.draft_tokens) == (right == 1)
    threaded.close()


def test_answers_are_the_same_with_drafts_and_without(reference: Reference) -> None:
    check_same_answers(reference, 1, [1.0, 0.7, 0.0])


def test_ranks_agree_on_drafts(some_reference: Reference) -> None:
    check_same_answers(some_reference, 2, [0.8])


def test_what_repeats_is_found() -> None:
    drafter, text = NgramDrafter(), [5, 6, 7, 8, 9, 5, 6, 7]
    request = Request(1, text, SamplingParams(), 0, None)
    assert drafter.propose(request, 2) == [8, 9]
    assert drafter.propose(request, 7) == [8, 9, 5, 6, 7, 8, 9], "a text that goes round goes on going round"
    request.tokens += [1, 2, 3]
    assert drafter.propose(request, 4) == []
    request.tokens += [9, 5, 6, 7]
    assert drafter.propose(request, 3) == [1, 2, 3]
    request.tokens += [4, 0, 5, 6, 7]
    assert drafter.propose(request, 1) == [4], "of places that agree as long, the last"
    request.tokens += [2, 3, 9, 5, 6, 7]
    assert drafter.propose(request, 2) == [4, 0], "but rather one where more of what came before agrees"
    drafter.forget(request)
    assert not drafter._indices
