"""A batch in virtual time, by counting: the steps the engine's scheduler would take, without a row for every token.

All sequences that decode move on by one token a step, so a step costs as much as what changes in it: a prompt comes in,
an answer ends, a block is full. Tests hold every step against `ScheduledBatch`, which runs the scheduler itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from phalanx.cost.rules import Rules
from phalanx.cost.step import Step
from phalanx.engine.scheduler import KEPT_FREE
from phalanx.plan.scheduled import BLOCK_SIZE, MostSteps, Moves, Room
from phalanx.spec.workload import Workload


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request. While it waits or is a prompt, `computed` of its `tokens` are in the cache and `left` are to come.

    While it decodes, `offset` more than the rounds so far are computed, and it ends with round `last_round`.
    """

    index: int
    tokens: int
    left: int
    computed: int = 0
    offset: int = 0
    last_round: int = 0
    has_begun: bool = False

    @property
    def rest(self) -> int:
        return self.tokens - self.computed

    @property
    def full_at(self) -> int:
        """Its blocks are full, and it needs another, in rounds that leave this when divided by the block size."""
        return -self.offset % BLOCK_SIZE


@dataclass(slots=True)
class _Rows:
    """The sums of a step. Rows of one token count as decodes, whatever they compute."""

    decodes: int = 0
    context: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    prompts: int = 0

    def add(self, start: int, count: int) -> None:
        if count == 1:
            self.decodes += 1
            self.context += start + 1
            return
        self.prompts += 1
        self.prompt_tokens += count
        self.prompt_pairs += count * (start + (count + 1) / 2)

    def to_step(self) -> Step:
        return Step(self.decodes, self.context, self.prompt_tokens, self.prompt_pairs, self.prompts)


class CountedBatch:
    """`Scheduler` and its policies for requests without shared prefixes and steps with room for every decode."""

    @classmethod
    def covers(cls, workload: Workload, rules: Rules, kv_tokens: int | None) -> bool:
        room = Room.of(workload, rules, kv_tokens)
        return not workload.shared_prefix and room.step_tokens >= room.sequences + 2

    def __init__(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> None:
        self._room = Room.of(workload, rules, kv_tokens)
        self._admission = rules.admission
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._prompts: list[_Sequence] = []
        self._free = self._room.blocks
        self._rounds = 0
        self._decoding = 0
        self._computed = 0
        self._full_at = [0] * BLOCK_SIZE
        self._ending: dict[int, list[_Sequence]] = {}
        self._sampled: list[_Sequence] = []
        self._rows = _Rows()
        self.preemptions = 0
        self.cached_tokens = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, index: int, input_tokens: int, output_tokens: int) -> None:
        self._waiting.append(_Sequence(index, input_tokens, output_tokens))

    def step(self) -> Moves:
        self._rows, self._sampled = _Rows(), []
        if self._admission == "first":
            self._prompts_alone()
        else:
            self._prompts_beside_decodes()
        return self._apply()

    def _prompts_alone(self) -> None:
        budget = self._continue_prompts(self._room.step_tokens, [each for each in self._prompts if each.rest > 1])
        self._admit(budget, len(self._waiting))
        if not self._rows.prompts and not self._sampled:
            self._decode()
            self._continue_prompts(self._room.step_tokens, self._prompts)

    def _prompts_beside_decodes(self) -> None:
        preempted = self._decode()
        budget = self._continue_prompts(self._room.step_tokens - self._decoding, self._prompts)
        if not preempted:
            self._admit(budget, self._fitting(budget) if self._admission == "whole" else len(self._waiting))

    def _fitting(self, budget: int) -> int:
        """How many of the waiting requests fit whole, or one that would never."""
        count = 0
        for sequence in self._waiting:
            budget -= sequence.tokens
            if budget < 0:
                return count or int(not any(each.rest > 1 for each in self._prompts))
            count += 1
        return count

    def _continue_prompts(self, budget: int, prompts: list[_Sequence]) -> int:
        for sequence in list(prompts):
            if budget > 0:
                self._prompts.remove(sequence)
                budget -= self._compute(sequence, min(sequence.rest, budget))
        return budget

    def _admit(self, budget: int, most: int) -> None:
        for sequence in list(islice(self._waiting, most)):
            needed = _blocks(sequence.tokens)
            kept_free = int(KEPT_FREE * self._room.blocks) if self._running else 0
            if budget <= 0 or len(self._running) >= self._room.sequences or needed + kept_free > self._free:
                return
            self._waiting.popleft()
            self._running[sequence.index] = sequence
            self._free -= needed
            budget -= self._compute(sequence, min(sequence.tokens, budget))

    def _compute(self, sequence: _Sequence, count: int) -> int:
        self._rows.add(sequence.computed, count)
        sequence.computed += count
        (self._prompts if sequence.rest else self._sampled).append(sequence)
        return count

    def _decode(self) -> bool:
        """One token for every sequence that decodes. True when some had to give up their blocks for it."""
        needed = self._full_at[self._rounds % BLOCK_SIZE]
        preempted = needed > self._free
        if preempted:
            self._make_room()
        else:
            self._free -= needed
        self._rows.decodes += self._decoding
        self._rows.context += self._computed + self._decoding
        if self._decoding:
            self._rounds += 1
            self._computed += self._decoding
        return preempted

    def _make_room(self) -> None:
        """In order of arrival everyone who needs a block takes one; where there is none, the youngest gives up all."""
        for sequence in list(self._running.values()):
            if sequence.index not in self._running or not self._needs_block(sequence):
                continue
            while not self._free:
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest)
                if youngest is sequence:
                    return
            self._free -= 1

    def _needs_block(self, sequence: _Sequence) -> bool:
        return sequence.last_round > 0 and sequence.full_at == self._rounds % BLOCK_SIZE

    def _preempt(self, sequence: _Sequence) -> None:
        if sequence.last_round:
            self._ending[sequence.last_round].remove(sequence)
            sequence.left = sequence.last_round - self._rounds
            sequence.tokens = self._leave(sequence) + 1
            sequence.last_round = 0
        else:
            del self._running[sequence.index]
            self._prompts.remove(sequence)
            self._free += _blocks(sequence.tokens)
        sequence.computed = 0
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _leave(self, sequence: _Sequence) -> int:
        """Take a decoding sequence out of the books. Returns how many of its tokens were computed."""
        computed = self._rounds + sequence.offset
        del self._running[sequence.index]
        self._decoding -= 1
        self._computed -= computed
        self._full_at[sequence.full_at] -= 1
        self._free += _blocks(computed)
        return computed

    def _apply(self) -> Moves:
        ended = self._ending.pop(self._rounds, [])
        for sequence in ended:
            self._leave(sequence)
        last = [sequence.index for sequence in ended]
        first = []
        for sequence in self._sampled:
            if not sequence.has_begun:
                sequence.has_begun = True
                first.append(sequence.index)
            sequence.left -= 1
            self._begin_decode(sequence)
            if not sequence.left:
                self._leave(sequence)
                last.append(sequence.index)
        return Moves(self._rows.to_step(), first, last)

    def _begin_decode(self, sequence: _Sequence) -> None:
        sequence.offset = sequence.tokens - self._rounds
        self._decoding += 1
        self._computed += sequence.tokens
        self._full_at[sequence.full_at] += 1
        if sequence.left:
            sequence.last_round = self._rounds + sequence.left
            self._ending.setdefault(sequence.last_round, []).append(sequence)

    def leap(self, most: MostSteps) -> Step | None:
        """Take all steps up to the next change at once: until then every step is a decode of the same requests."""
        if not self._running or self._rows.prompt_tokens:
            return None
        count = min(min(filter(self._ending.get, self._ending)) - self._rounds - 1, most(self._present()))
        while count > 0 and sum(self._missing(count)) > self._free:
            count //= 2
        if count <= 0:
            return None
        self._free -= sum(self._missing(count))
        step = Step(self._decoding, self._computed + self._decoding * (count + 1) / 2, repeats=count)
        self._rounds += count
        self._computed += count * self._decoding
        return step

    def _present(self) -> Step:
        return Step(self._decoding, self._computed)

    def _missing(self, count: int) -> Iterator[int]:
        """Blocks that `count` more rounds take, by when the last one is full."""
        for full_at, sequences in enumerate(self._full_at):
            if sequences:
                filled = (self._rounds - full_at) % BLOCK_SIZE
                yield sequences * (_blocks(filled + count) - _blocks(filled))
