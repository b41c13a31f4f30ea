"""A batch in virtual time, by counting: the steps the engine's scheduler would take, without a row for every token.

All sequences that decode move on by one token a step, so a step costs as much as what changes in it: a prompt comes in,
an answer ends, a block is full. Tests hold every step against `ScheduledBatch`, which runs the scheduler itself. A
prefix that prompts share is taken to stay in the cache once it is there, as it does while it is asked for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from phalanx.cost.rules import Rules
from phalanx.engine.defaults import BLOCK_SIZE
from phalanx.engine.passing import Passing
from phalanx.engine.roster import kept_free
from phalanx.engine.step_sums import StepSums
from phalanx.plan.scheduled import MostSteps, Moves, Room
from phalanx.spec.workload import Workload

_arrival = attrgetter("index")


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request. While it waits or is a prompt, `computed` of its `tokens` are in the cache and `left` are to come.

    While it decodes, `offset` more than the rounds so far are computed, and it ends with round `last_round`. Of its
    blocks, `shared` are a prefix that belongs to all prompts of its agent.
    """

    index: int
    tokens: int
    left: int
    agent: int = 0
    shared: int = 0
    computed: int = 0
    offset: int = 0
    last_round: int = 0
    has_begun: bool = False
    preempted: bool = False

    @property
    def rest(self) -> int:
        return self.tokens - self.computed

    @property
    def full_at(self) -> int:
        """Its blocks are full, and it needs another, in rounds that leave this when divided by the block size."""
        return -self.offset % BLOCK_SIZE


class CountedBatch:
    """`Scheduler` and its policies: for steps with room for every decode, prefixes that fill half the cache at most."""

    @classmethod
    def covers(cls, workload: Workload, rules: Rules, kv_tokens: int | None) -> bool:
        if rules.admission == "static" or workload.sessions:
            return False
        room = Room.of(workload, rules, kv_tokens)
        prefixes = workload.agents * _blocks(workload.shared_prefix)
        return 2 * prefixes <= room.blocks and room.step_tokens >= room.sequences + 2

    def __init__(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> None:
        self._room = Room.of(workload, rules, kv_tokens)
        self._admission = rules.admission
        self._prefix = workload.shared_prefix // BLOCK_SIZE
        self._agents = workload.agents
        self._warm: set[int] = set()
        self._waiting: list[_Sequence] = []
        self._running: dict[int, _Sequence] = {}
        self._prompts: list[_Sequence] = []
        self._free = self._room.blocks
        self._rounds = 0
        self._decoding = 0
        self._computed = 0
        self._full_at = [0] * BLOCK_SIZE
        self._ending: dict[int, list[_Sequence]] = {}
        self._sampled: list[_Sequence] = []
        self._sums = StepSums()
        self._passing = Passing()
        self.preemptions = 0
        self.cached_tokens = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, index: int, input_tokens: int, output_tokens: int) -> None:
        self._waiting.append(_Sequence(index, input_tokens, output_tokens, index % self._agents))

    def step(self) -> Moves:
        self._sums, self._sampled = StepSums(), []
        if self._admission == "first":
            self._prompts_alone()
        else:
            self._prompts_beside_decodes()
        return self._apply()

    def _prompts_alone(self) -> None:
        budget = self._continue_prompts(self._room.step_tokens, [each for each in self._prompts if each.rest > 1])
        self._admit(budget, self._waiting)
        if not self._sums.prompts and not self._sampled:
            self._decode()
            self._continue_prompts(self._room.step_tokens, self._prompts)

    def _prompts_beside_decodes(self) -> None:
        preempted = self._decode()
        last_tokens = [each for each in self._prompts if each.rest == 1]
        budget = self._continue_prompts(self._room.step_tokens - self._decoding, last_tokens)
        if self._admission == "fair":
            budget -= self._let_pass(budget, may_admit=not preempted)
        budget = self._continue_prompts(budget, [each for each in self._prompts if each.rest > 1])
        if not preempted:
            whole = self._admission == "whole"
            self._admit(budget, islice(self._waiting, self._fitting(budget)) if whole else self._waiting)

    def _let_pass(self, budget: int, may_admit: bool) -> int:
        """Tokens of a step that go to shorter prompts while the first one is long."""
        prompts = sorted((each for each in self._prompts if each.rest > 1), key=_arrival)
        if not prompts or not self._is_long(prompts[0]):
            return 0
        part = self._passing.part(prompts[0].index, prompts[0].rest, budget)
        left = self._continue_prompts(part, [each for each in prompts if not self._is_long(each)])
        if may_admit:
            left = self._admit(left, [each for each in self._waiting if not self._is_long(each)])
        self._passing.took(part - left)
        return part - left

    def _is_long(self, sequence: _Sequence) -> bool:
        return sequence.rest > self._room.step_tokens

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
        for sequence in sorted(prompts, key=_arrival):
            if budget > 0:
                self._prompts.remove(sequence)
                budget -= self._compute(sequence, min(sequence.rest, budget))
        return budget

    def _admit(self, budget: int, candidates: Iterable[_Sequence]) -> int:
        for sequence in list(islice(candidates, self._room.sequences - len(self._running))):
            found = self._found(sequence)
            needed, running = _blocks(sequence.tokens) - found, len(self._running)
            spared = kept_free(self._room.blocks, running, sequence.preempted) if running else 0
            if budget <= 0 or needed + spared > self._free:
                break
            self._waiting.remove(sequence)
            self._running[sequence.index] = sequence
            self._free -= needed
            sequence.shared, sequence.computed = found, found * BLOCK_SIZE
            self.cached_tokens += sequence.computed
            budget -= self._compute(sequence, min(sequence.rest, budget))
        return budget

    def _found(self, sequence: _Sequence) -> int:
        """Blocks of its prompt that are in the cache: never all, since a token has to be computed."""
        return min(self._prefix, (sequence.tokens - 1) // BLOCK_SIZE) if sequence.agent in self._warm else 0

    def _compute(self, sequence: _Sequence, count: int) -> int:
        self._sums.add_row(sequence.computed, count)
        sequence.computed += count
        self._keep_prefix(sequence)
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
        self._sums.decodes += self._decoding
        self._sums.context += self._computed + self._decoding
        if self._decoding:
            self._rounds += 1
            self._computed += self._decoding
        return preempted

    def _make_room(self) -> None:
        """The last to arrive give up all their blocks, until there is one for everyone left who needs one."""
        while (needed := sum(map(self._needs_block, self._running.values()))) > self._free:
            self._preempt(self._running[max(self._running)])
        self._free -= needed

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
            self._free += _blocks(sequence.tokens) - sequence.shared
        sequence.computed = sequence.shared = 0
        sequence.preempted = True
        insort(self._waiting, sequence, key=_arrival)
        self.preemptions += 1

    def _leave(self, sequence: _Sequence) -> int:
        """Take a decoding sequence out of the books. Returns how many of its tokens were computed."""
        computed = self._rounds + sequence.offset
        del self._running[sequence.index]
        self._decoding -= 1
        self._computed -= computed
        self._full_at[sequence.full_at] -= 1
        self._free += _blocks(computed) - sequence.shared
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
        return Moves(self._sums, first, last)

    def _keep_prefix(self, sequence: _Sequence) -> None:
        """The first prompt of an agent to compute the prefix leaves it behind for all others."""
        if self._prefix and sequence.agent not in self._warm and sequence.computed >= self._prefix * BLOCK_SIZE:
            self._warm.add(sequence.agent)
            sequence.shared = self._prefix

    def _begin_decode(self, sequence: _Sequence) -> None:
        sequence.offset = sequence.tokens - self._rounds
        self._decoding += 1
        self._computed += sequence.tokens
        self._full_at[sequence.full_at] += 1
        if sequence.left:
            sequence.last_round = self._rounds + sequence.left
            self._ending.setdefault(sequence.last_round, []).append(sequence)

    def leap(self, most: MostSteps) -> tuple[StepSums, int] | None:
        """Take all steps up to the next change at once, each a decode of the same requests: their mean and number."""
        if not self._running or self._sums.prompt_tokens:
            return None
        count = min(min(filter(self._ending.get, self._ending)) - self._rounds - 1, most(self._present()))
        while count > 0 and self._missing(count) > self._free:
            count //= 2
        if count <= 0:
            return None
        self._free -= self._missing(count)
        mean = StepSums(self._decoding, self._computed + self._decoding * (count + 1) / 2)
        self._rounds += count
        self._computed += count * self._decoding
        return mean, count

    def _present(self) -> StepSums:
        return StepSums(self._decoding, self._computed)

    def _missing(self, count: int) -> int:
        """Blocks that `count` more rounds take: one for every sequence whose blocks are full in a round."""
        times_all, rest = divmod(count, BLOCK_SIZE)
        soon = sum(self._full_at[place % BLOCK_SIZE] for place in range(self._rounds, self._rounds + rest))
        return times_all * self._decoding + soon
