"""How many requests a second an engine can take in, from the price of its steps alone.

A batch that stays as full as it is ends as many requests in a step as it begins: so many rows decode, so many prompts
come in, and the price of such a step says how often there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from phalanx.cost.rules import Rules
from phalanx.engine.defaults import BLOCK_SIZE
from phalanx.engine.step_sums import StepSums
from phalanx.plan.scheduled import Room
from phalanx.plan.simulate import StepPrice
from phalanx.spec.workload import Workload

HELD = 0.85
"""Of what an engine does with a queue that never empties, the most that it can be asked for: above, Poisson arrivals
pile up for many minutes at a time, and no run is long enough to say for how long."""


@dataclass(frozen=True)
class Flow:
    """One replica under traffic of these lengths. Of a replica with several batches that move `together` (stages of a
    pipeline, ranks that share experts), one of them: a prompt in any makes all of them wait.
    """

    workload: Workload
    rules: Rules
    room: Room
    price: StepPrice
    together: int = 1

    @classmethod
    def of(cls, workload: Workload, rules: Rules, kv_tokens: int | None, price: StepPrice, together: int = 1) -> Flow:
        return cls(workload, rules, Room.of(workload, rules, kv_tokens), price, together)

    @property
    def capacity(self) -> float:
        """Requests a second that can be held."""
        return HELD * self.rate(self.room.sequences)

    def sequences(self, rate: float) -> int:
        """How many are in the batch while requests arrive at this rate; all it may hold when they are too many."""
        low, high = 1, self.room.sequences
        while low < high:
            middle = (low + high) // 2
            if self.rate(middle) >= rate:
                high = middle
            else:
                low = middle + 1
        return low

    def rate(self, sequences: int) -> float:
        """Requests a second with a batch of so many."""
        ended, seconds, _ = self._step(sequences)
        return ended / seconds

    def wait(self, sequences: int) -> float:
        """Seconds that a step without prompts waits for those of the other batches, on average."""
        return self._step(sequences)[2]

    def _step(self, sequences: int) -> tuple[float, float, float]:
        """Requests that end in a step, its mean seconds, and what of them a step without prompts waits for others."""
        load, prompt = self.workload, self._computed_prompt
        alone = self.rules.admission == "first"
        rows = float(sequences)
        if not alone:
            rows = min(rows, self.room.step_tokens / (1 + prompt / load.mean_output))
        ended = rows / load.mean_output
        often, tokens = self._prompt_steps(ended, 0.0 if alone else rows)
        decode = StepSums(round(rows), rows * (load.mean_input + load.mean_output / 2))
        pairs = tokens * (load.mean_input - prompt + prompt / 2)
        prompts = StepSums(0, 0, round(tokens), pairs, max(1, round(ended / often)))
        elsewhere = 1 - (1 - often) ** (self.together - 1)
        if alone:
            waits = elsewhere * self.price(prompts)
            return ended, self.price(decode) + often * self.price(prompts) + waits, waits
        both = self.price(StepSums(decode.decodes, decode.context, prompts.prompt_tokens, pairs, prompts.prompts))
        without = self.price(decode)
        waits = elsewhere * max(0.0, both - without)
        return ended, (1 - often) * (without + waits) + often * both, waits

    def _prompt_steps(self, ended: float, rows: float) -> tuple[float, float]:
        """How often a step has prompts, and how many of their tokens: requests end at random, one or some at a time."""
        often = 1 - exp(-ended)
        room = max(1.0, self.room.step_tokens - rows)
        tokens = ended * self._computed_prompt / often
        if tokens <= room:
            return often, max(1.0, tokens)
        return min(1.0, ended * self._computed_prompt / room), room

    @property
    def _computed_prompt(self) -> float:
        """Tokens of a prompt that are not found in the cache."""
        shared = self.workload.shared_prefix // BLOCK_SIZE * BLOCK_SIZE
        return max(1.0, self.workload.mean_input - shared)
