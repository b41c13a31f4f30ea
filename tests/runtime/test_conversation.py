"""An agent's loop on a model with recurrent states: each turn goes on behind the last one, with the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from phalanx import SamplingParams
from tests.conftest import VOCAB, Reference
from tests.threaded_ranks import ThreadedEngine

TURNS, ANSWER, NEWS = 20, 8, 8


def test_twenty_turns_compute_a_tenth_of_their_tokens_at_most(references: Callable[[str], Reference]) -> None:
    folder, rng = references("qwen3_5_moe_text").folder, random.Random(3)
    limits = {"max_model_len": 480, "num_blocks": 80, "max_num_batched_tokens": 128}
    warm, cold = (ThreadedEngine(folder, 2, prefix_caching=cached, **limits) for cached in (True, False))
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    text = [rng.randrange(VOCAB) for _ in range(100)]
    for turn in range(TURNS):
        (request,) = warm.generate([text], greedy)
        if turn in (1, TURNS - 1):
            assert request.output == cold.generate([text], greedy)[0].output
        text = request.tokens + [rng.randrange(VOCAB) for _ in range(NEWS)]
    scheduler = warm.engine.scheduler
    assert scheduler.prefix_hits / scheduler.prefix_queries > 0.9
    warm.close()
    cold.close()
