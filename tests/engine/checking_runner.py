"""A runner for tests that behaves like a rank and trusts nothing.

It knows of a request only what the plans carried, keeps a simulated KV cache that says of every place which prefix was
computed there, and checks on each launch that every row reads exactly the keys and values of its own tokens: all of
them, in each window those in its reach, and of recurrent states the one that stands for all of them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import msgspec

from phalanx.engine.caches import CacheLayout
from phalanx.engine.masks import places_for, unpack
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits
from phalanx.engine.step_plan import Admission, StepPlan, StepResult


def next_token(history: Sequence[int], seed: int, vocab: int, mask: bytes | None = None) -> int:
    """The token that follows `history`: it depends on every token before it, on the seed and on the mask alone."""
    allowed = [token for token in range(vocab) if mask is None or mask[token // 8] >> token % 8 & 1]
    return allowed[crc32(array("q", [seed, *history]).tobytes()) % len(allowed)]


@dataclass
class Slot:
    """What a rank keeps of the request in one slot."""

    prompt_length: int
    tokens: list[int]
    seed: int
    params: SamplingParams
    tables: list[list[int]]
    computed: int
    unsure: bool = False
    """Behind a row of drafts: which of them came true is known to the engine alone."""
    prefixes: list[int] = field(default_factory=list)
    """Of its tokens, as far as they were asked for."""


@dataclass(frozen=True)
class Row:
    slot: int
    start: int
    count: int
    samples: int

    @property
    def sampled(self) -> bool:
        return self.samples > 0

    @property
    def end(self) -> int:
        return self.start + self.count


class CheckingRunner:
    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        vocab: int,
        depth: int = 1,
        price: Callable[[StepPlan], float] = lambda plan: 1.0,
        layout: CacheLayout | None = None,
    ) -> None:
        self.depth = depth
        self.limits = limits
        self.layout = layout or CacheLayout()
        self.reaches = (None, *self.layout.windows)
        self.states: dict[int, tuple[int, ...]] = {}
        """By place, the prefixes that a sequence may go on behind."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab = vocab
        self.slots: dict[int, Slot] = {}
        self.plans: list[StepPlan] = []
        self.in_flight = 0
        self._inner = ModelledRunner(price, lambda slot, position: self._sampled[0][slot, position], depth)
        self._sampled: deque[dict[tuple[int, int], int]] = deque()
        self._prefix_numbers: dict[tuple[int, int], int] = {}
        self.masks: dict[int, bytes] = {}
        self._kv: list[dict[int, int]] = [{} for _ in self.reaches]
        """Of each group, the prefixes that were computed, by place: what one group writes, no other finds there."""
        self.right, self.draft_s, self._random = 1.0, 0.0, Random(0)
        """How often drafts that are made here come true, and what one of every row takes, or to take a step in."""
        self._late_s = 0.0
        self._drafts: deque[list[list[int]]] = deque()
        self._drafted: deque[list[int]] = deque()
        self._stayed: dict[int, int] = {}
        """Drafts that nobody was told of, by their place."""

    @property
    def clock(self) -> float:
        return self._inner.clock

    def launch(self, plan: StepPlan) -> None:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        assert self.in_flight < self.depth, f"{self.in_flight} steps in flight, depth is {self.depth}"
        assert plan.step == len(self.plans) + 1, f"step {plan.step} after step {len(self.plans)}"
        rows = self._rows(plan)
        self._admit(plan.admissions, rows)
        self._extend(plan.new_blocks, plan.window_blocks)
        self._hear(plan.told, rows, plan.reread)
        self._restore(plan.restored, rows)
        for row in rows:
            self._take(row, fresh=any(row.slot == admission.slot for admission in plan.admissions))
        self._write(rows)
        for row in rows:
            self._read(row)
        self._save(plan.saved)
        assert all(0 <= place < places_for(self.limits.max_num_seqs) for place, _ in plan.new_masks)
        self.masks |= {place: unpack(packed) for place, packed in plan.new_masks}
        self._sampled.append(self._sample(rows, {index: self.masks[place] for index, place in plan.masks}))
        self._drafted.append([token for row in rows for token in self._drafts_in(row)] if plan.reread else [])
        drafts = [self._draft(row, plan.ahead) for row in rows if row.samples] if plan.ahead else []
        if plan.drafts_stay:
            assert drafts, "no drafts that could stay"
            self._keep(rows, drafts)
        self._drafts.append([] if plan.drafts_stay else drafts)
        self.plans.append(plan)
        self.in_flight += 1
        self._inner.launch(plan)

    def find_break(self, slot: int, position: int) -> str:
        return f"slot {slot} at {position}"

    def collect(self) -> StepResult:
        assert self.in_flight > 0, "nothing to collect"
        self.in_flight -= 1
        plan = self.plans[-1 - self.in_flight]
        drafting_s = (plan.ahead + plan.taken_in) * self.draft_s
        result = self._inner.collect()
        self._sampled.popleft()
        self._inner.clock += drafting_s
        if plan.drafts_stay:  # timed when the next step is read, as on a GPU
            drafting_s, self._late_s = self._late_s, drafting_s
        else:
            self._late_s = 0.0
        times = msgspec.structs.replace(result.times, draft=drafting_s)
        drafts, drafted = self._drafts.popleft(), self._drafted.popleft()
        return msgspec.structs.replace(result, times=times, drafts=drafts, drafted=drafted)

    def close(self) -> None:
        self._inner.close()

    def _rows(self, plan: StepPlan) -> list[Row]:
        columns = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
        rows = [Row(*column) for column in columns]
        kinds = [0 if row.count == 1 else 1 if row.samples > 1 else 2 for row in rows]
        assert rows, "an empty step"
        assert kinds == sorted(kinds), f"rows of one token come first, then drafts: {plan.counts}, {plan.samples}"
        assert all(row.samples <= max(1, row.count) for row in rows), f"more tokens than rows: {plan.samples}"
        assert all(row.count > 0 for row in rows), f"a row without tokens: {plan.counts}"
        assert len(set(plan.slots)) == len(rows) <= self.limits.max_num_seqs, f"slots {plan.slots}"
        assert all(0 <= slot < self.limits.max_num_seqs for slot in plan.slots), f"slots {plan.slots}"
        assert plan.num_tokens <= self.limits.max_num_batched_tokens, f"{plan.num_tokens} tokens in one step"
        return rows

    def _admit(self, admissions: list[Admission], rows: list[Row]) -> None:
        slots = [admission.slot for admission in admissions]
        assert len(set(slots)) == len(slots), f"slots admitted twice: {slots}"
        by_slot = {row.slot: row for row in rows}
        for admission in admissions:
            row = by_slot[admission.slot]
            tokens = list(admission.tokens)
            assert 0 < admission.prompt_length <= len(tokens), "an admission brings its whole prompt"
            assert row.start % self.block_size == 0, f"a cached prefix of {row.start} tokens is not whole blocks"
            assert row.start < len(tokens), "at least the last token is computed"
            self.slots[admission.slot] = Slot(
                admission.prompt_length, tokens, admission.seed, admission.params, [[] for _ in self.reaches], row.start
            )

    def _extend(self, new_blocks: list[tuple[int, list[int]]], window_blocks: list[tuple[int, int, list[int]]]) -> None:
        told = [(number, 0, blocks) for number, blocks in new_blocks]
        told += [(number, 1 + group, blocks) for number, group, blocks in window_blocks]
        assert len({(number, group) for number, group, _ in told}) == len(told), f"a slot is named twice: {told}"
        for number, group, blocks in told:
            table = self.slots[number].tables[group]
            table += blocks
            assert blocks, f"slot {number} is named for no block"
            known = range(self.num_blocks)
            if group == 0:
                if self.layout.token_blocks:
                    known = range(self.num_blocks + 1, self.num_blocks + 1 + self.layout.token_blocks)
                assert len(set(table)) == len(table), f"slot {number} has a block twice: {table}"
            assert all(block in known for block in blocks), f"no such block: {blocks}"

    def _hear(self, told: list[tuple[int, int, list[int]]], rows: list[Row], reread: bool) -> None:
        """Who is unsure is told all that it computes, but for drafts that have stayed here; nobody is told what it
        knows better.
        """
        by_slot = {row.slot: row for row in rows}
        for number, position, known in told:
            slot, row = self.slots[number], by_slot[number]
            assert all(0 <= token < self.vocab for token in known), f"slot {number} is told what is no token: {known}"
            tokens = list(known)
            if reread and len(tokens) == row.count - row.samples + 1 < row.count:
                places = [self._place(slot, at, 0) for at in range(position + len(tokens), row.end)]
                tokens += [self._stayed.get(place, 0) for place in places]
            told_of = position, position + len(tokens)
            assert told_of == (row.start, row.end), f"slot {number} is told {tokens} at {position}"
            assert position <= slot.computed <= len(slot.tokens), f"slot {number} is told of a far future"
            assert slot.unsure or slot.tokens[position:] == tokens[: len(slot.tokens) - position], "a false history"
            slot.tokens[position:] = tokens
            del slot.prefixes[position:]
            slot.computed, slot.unsure = position, False

    def _restore(self, restored: list[tuple[int, int]], rows: list[Row]) -> None:
        """Behind the first token a state is read; it begins with the first one whatever lay there before."""
        before = dict(self.states)
        for source, target in restored:
            if target in self.layout.twins:
                assert target == self.layout.twins[source], f"slot {source} has another twin than {target}"
            else:
                assert source in (*self.layout.snapshots, self.layout.twins[target] if self.layout.twins else None)
            self.states[target] = before.get(source, ())
        for row in rows if self.layout.states else ():
            slot = self.slots[row.slot]
            if row.start:
                wanted = self._prefixes(slot, row.start)[-1]
                assert wanted in self.states[row.slot], f"slot {row.slot} goes on from another state"
            goes_back = row.samples > 1 and not self.layout.twins
            self.states[row.slot] = tuple(self._prefixes(slot, row.end)[row.start if goes_back else -1 :])

    def _save(self, saved: list[tuple[int, int]]) -> None:
        assert len({place for _, place in saved}) == len(saved), f"a place is written twice: {saved}"
        for slot, place in saved:
            assert place in self.layout.snapshots, f"place {place} is not one for snapshots"
            self.states[place] = self.states[slot]

    def _take(self, row: Row, fresh: bool) -> None:
        slot = self.slots[row.slot]
        assert not slot.unsure, f"slot {row.slot} was not told what came of its drafts"
        assert row.start == slot.computed, f"slot {row.slot} starts at {row.start}, {slot.computed} are computed"
        assert row.end <= len(slot.tokens), f"slot {row.slot} computes to {row.end} of {len(slot.tokens)} tokens"
        assert row.end <= self.limits.max_model_len, f"slot {row.slot} computes beyond the context"
        assert row.sampled == (row.end == len(slot.tokens)), f"slot {row.slot} samples in the middle, or not at its end"
        for group, table in enumerate(slot.tables):
            needed = -(-(len(slot.tokens) if fresh and not group else row.end) // self.block_size)
            assert len(table) >= needed, f"slot {row.slot} has {len(table)} blocks of {needed}"
        slot.computed = row.end

    def _write(self, rows: list[Row]) -> None:
        written: set[int] = set()
        for row in rows:
            slot = self.slots[row.slot]
            prefixes = self._prefixes(slot, row.end)
            for group, kept in enumerate(self._kv):
                for position in range(row.start, row.end):
                    place = self._place(slot, position, group)
                    assert place not in written, f"two rows write place {place} in one step"
                    written.add(place)
                    for other in self._kv:
                        other.pop(place, None)
                    kept[place] = prefixes[position]

    def _read(self, row: Row) -> None:
        """All rows have written by now: within a layer, a step stores its keys and values before it attends."""
        slot = self.slots[row.slot]
        prefixes = self._prefixes(slot, row.end)
        for table, reach, kept in zip(slot.tables, self.reaches, self._kv, strict=True):
            first = 0 if reach is None else max(0, row.start - reach + 1)
            whole = range(first // self.block_size, -(-row.end // self.block_size))
            starts = [table[index] * self.block_size for index in whole]
            found = [kept.get(place) for start in starts for place in range(start, start + self.block_size)]
            found = found[first % self.block_size :][: row.end - first]
            assert None not in found, f"slot {row.slot} reads at {first + found.index(None)} what was never written"
            assert found == prefixes[first:], f"slot {row.slot} reads another prefix behind {first}: {found}"

    def _sample(self, rows: list[Row], masks: dict[int, bytes]) -> dict[tuple[int, int], int]:
        """What the rows yield. Of a row of drafts it is not known yet what of it stands."""
        found: dict[tuple[int, int], int] = {}
        for row in rows:
            slot = self.slots[row.slot]
            for position in range(row.end - row.samples + 1, row.end + 1):
                mask = masks.pop(len(found), None)
                found[row.slot, position] = next_token(slot.tokens[:position], slot.seed, self.vocab, mask)
            if row.samples > 1:
                slot.unsure = True
            elif row.samples:
                slot.tokens.append(found[row.slot, row.end])
        assert not masks, "a mask for a token that no row yields"
        return found

    def _drafts_in(self, row: Row) -> list[int]:
        return self.slots[row.slot].tokens[row.end - row.samples + 1 : row.end] if row.samples > 1 else []

    def _keep(self, rows: list[Row], drafts: list[list[int]]) -> None:
        """Behind the tokens that stand, as far as there are blocks."""
        for row, tokens in zip((row for row in rows if row.samples), drafts, strict=True):
            slot, yielded = self.slots[row.slot], self._sampled[-1]
            position = self._stands_to(row, slot, yielded) + 1
            for at, token in enumerate(tokens, start=position):
                if at // self.block_size < len(slot.tables[0]):
                    self._stayed[self._place(slot, at, 0)] = token

    def _stands_to(self, row: Row, slot: Slot, yielded: dict[tuple[int, int], int]) -> int:
        """The position of the last token that a row yields which stands."""
        position = row.end - row.samples + 1
        while position < row.end and slot.tokens[position] == yielded[row.slot, position]:
            position += 1
        return position

    def _draft(self, row: Row, ahead: int) -> list[int]:
        """Behind the last token of a row that stands, as a rank makes them: it knows nothing of grammars."""
        slot, yielded = self.slots[row.slot], self._sampled[-1]
        position = self._stands_to(row, slot, yielded)
        tokens = [*slot.tokens[:position], yielded[row.slot, position]]
        for _ in range(ahead):
            token = next_token(tokens, slot.seed, self.vocab)
            tokens.append(token if self._random.random() < self.right else (token + 1) % self.vocab)
        return tokens[position + 1 :]

    def _place(self, slot: Slot, position: int, group: int) -> int:
        return slot.tables[group][position // self.block_size] * self.block_size + position % self.block_size

    def _prefixes(self, slot: Slot, end: int) -> list[int]:
        """A number for each prefix; two prefixes have the same number only if they are equal token by token."""
        numbers = slot.prefixes
        parent = numbers[-1] if numbers else 0
        for token in slot.tokens[len(numbers) : end]:
            parent = self._prefix_numbers.setdefault((parent, token), len(self._prefix_numbers) + 1)
            numbers.append(parent)
        return numbers[:end]
