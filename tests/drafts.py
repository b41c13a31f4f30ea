"""Drafters that know the answers, and are wrong as often as they are told to be."""

from __future__ import annotations

from random import Random
from typing import Any

from torch import Tensor

from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Scheduler
from phalanx.kernels.attention import AttentionBatch
from phalanx.runtime.drafting import Computed, Drawing, Guesser
from tests.threaded_ranks import ThreadedEngine

NEW_TOKENS = 16
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 0.7, "top_k": 20, "logit_bias": {3: 2.0}, "min_tokens": 9},
]

Answer = tuple[list[int], list[float | None]]
Known = dict[tuple[int, ...], list[int]]


def answers_of(threaded: ThreadedEngine, prompts: list[list[int]]) -> list[Answer]:
    """Tokens and their log-probabilities, each prompt asked in a way of its own."""
    engine = threaded.engine
    requests = [
        engine.add(
            prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=31 + index, **WAYS[index % len(WAYS)])
        )
        for index, prompt in enumerate(prompts)
    ]
    scores: dict[int, list[float | None]] = {request.id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            scores[output.request_id].append(output.logprobs and output.logprobs.sampled)
    return [(request.output, scores[request.id]) for request in requests]


class Rememberer:
    """Beside the scheduler."""

    def __init__(self, answers: Known, right: float) -> None:
        self._answers, self._right, self._random = answers, right, Random(5)

    def propose(self, request: Request, most: int) -> list[int]:
        answer = self._answers[tuple(request.tokens[: request.prompt_length])]
        done = len(request.tokens) - request.prompt_length
        rightly = [token if self._random.random() < self._right else token ^ 1 for token in answer[done:]]
        return rightly[: self._random.randint(1, most)]

    def may_follow(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        pass


class Knowing:
    """On a rank, in the place of a head or a model, which does all it would do. All ranks are wrong alike."""

    def __init__(self, guesser: Guesser, scheduler: Scheduler, answers: Known, right: float) -> None:
        self._guesser, self._scheduler, self._answers, self._right = guesser, scheduler, answers, right
        self.ahead = guesser.ahead

    def take_in(self, step: Computed) -> None:
        self._guesser.take_in(step)

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, drawing: Drawing | None) -> Tensor:
        guessed = self._guesser.guess(tokens, positions, attention, drawing)
        assert attention.decode is not None
        by_slot = {request.slot: request for request in self._scheduler.running}
        for row, (slot, position) in enumerate(zip(attention.decode.slots.tolist(), positions.tolist(), strict=True)):
            request = by_slot.get(slot)
            if request is None or (position * 7919 + slot) % 10 >= 10 * self._right:
                continue
            answer = self._answers[tuple(request.tokens[: request.prompt_length])]
            index = position + 2 - self.ahead - request.prompt_length
            if 0 <= index < len(answer):
                guessed[row] = answer[index]
        return guessed
