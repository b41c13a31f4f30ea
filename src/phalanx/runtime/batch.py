"""What a rank remembers of the batch between steps: tokens, block tables and sampling parameters by slot."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.masks import places_for
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.kernels.attention import FEW_KEYS, AttentionBatch, PrefillRow
from phalanx.kernels.draft_rows import Cache, Guess
from phalanx.kernels.lookup import NOWHERE, TARGETS, TokenPool, look_up, take_in, tokens_at
from phalanx.kernels.sampling_table import GREEDY_BELOW, PARAMETERS, pack
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows, PrefillTiles, tile_prompt
from phalanx.layers.adapters import StepAdapters
from phalanx.runtime.masks import Masks

_TABLES, _SAMPLING, _TOKENS, _LATEST_AT = range(TARGETS)
"""What is new goes to one of these."""


def tensor_of(values: list[int]) -> Tensor:
    """torch.tensor, which for a list takes seven times as long."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def repeated(values: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Each of these so many times. torch's own wakes a thread for every value, which takes milliseconds."""
    if len(counts) == 1:
        return torch.full((counts[0],), values[0])
    return torch.from_numpy(np.repeat(np.array(values, np.int64), counts))


def counted_on(firsts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """So many numbers on from each of these."""
    if len(counts) == 1:
        return torch.arange(firsts[0], firsts[0] + counts[0])
    ends = np.cumsum(counts)
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(np.array(firsts, np.int64) - ends + counts, counts))


@dataclass(frozen=True)
class Occupant:
    """The request in a slot."""

    params: SamplingParams
    prompt_length: int

    @property
    def plain_from(self) -> int:
        """The position from which on nothing changes its scores or reports them, grammars aside."""
        params = self.params
        always_special = params.penalised or params.logit_bias or params.logprobs is not None
        return sys.maxsize if always_special else self.prompt_length + params.min_tokens


@dataclass(frozen=True)
class StepInputs:
    """A plan as tensors, a row a token. `wanted` are those that yield one, or, where none does, one nobody will use."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    attention: AttentionBatch
    wanted: Tensor


class News:
    """Numbers for what a rank remembers and where each goes: in one copy and one launch, see `take_in`."""

    def __init__(self) -> None:
        self._places = [array("q") for _ in range(TARGETS)]
        self._numbers = [array("q") for _ in range(TARGETS)]

    def add(self, target: int, places: Iterable[int], numbers: Iterable[int]) -> None:
        self._places[target].extend(places)
        self._numbers[target].extend(numbers)

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def words(self) -> array[int]:
        """As `take_in` reads them."""
        found = array("q", accumulate(map(len, self._places)))
        for part in (*self._places, *self._numbers):
            found += part
        return found


def _grouped(batches: list[AttentionBatch]) -> AttentionBatch:
    """One for each group of layers, as one: that of the first group, which holds those of windows."""
    first, *windows = batches
    return replace(first, windows=tuple(windows)) if windows else first


class Batch:
    """The device token pool, the block tables and the sampling parameters (`sampling`, see `sampling_table.pack`).

    `tokens` holds prompts from admission on and sampled tokens from the step that made them, so the next step can be
    launched before anyone on the host has seen them. Behind the slots of requests lies one more, whose table points at
    a block that no request owns: rows that only fill up a batch go there, a whole tile of them at once. Behind the
    blocks of the cache there may be `token_blocks`, for tokens alone.

    Of most rows the sampler needs to know two things only, which lie beside each other by slot: from which position on
    they are `plain`, and whether they are drawn at random.
    """

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        block_size: int,
        spare_block: int,
        device: torch.device,
        groups: int = 1,
        states: bool = False,
        goes_back: bool = True,
        whole_prompts: bool = False,
        token_by_token: bool = False,
        token_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.token_by_token = token_by_token
        self.states = states
        self._goes_back = goes_back
        self._whole_prompts = whole_prompts or device.type == "cpu"
        self.device = device
        self.occupants: list[Occupant | None] = [None] * slots
        self.plain_from = [0] * slots
        self.adapters = [0] * slots
        self.is_drawn = [False] * slots
        self.masks = Masks(places_for(slots), device)
        self.spare_slot = slots
        self.tokens = TokenPool.of((spare_block + 1 + token_blocks) * block_size, slots + 1, device)
        self.sampling = torch.zeros(slots + 1, PARAMETERS, dtype=torch.int64, device=device)
        width = -(-max(max_model_len, PROMPT_TILE) // block_size)
        self._tables = torch.zeros(groups, slots + 1, width, dtype=torch.int32, device=device)
        self._tables[:, slots] = spare_block
        self._held: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in range(groups)]

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Take in what is new in the plan and lay its rows out as tensors."""
        self.take_in(self.read(plan))
        return self.lay_out(plan)

    def lay_out(self, plan: StepPlan) -> StepInputs:
        """The rows of a plan whose news are taken in."""
        slot_of, positions, wanted = self.send(*_tokens_of(plan))
        singles = self.singles(plan)
        tokens, places = look_up(self.tokens, self._tables, slot_of, positions, self.block_size)
        on_gpu, alone = self.device.type == "cuda", sum(plan.counts[:singles])
        tiles = self._prefill_tiles(plan, singles) if on_gpu and singles < len(plan.counts) else None
        ends = list(map(int.__add__, plan.starts, plan.counts))
        blocks = -(-max(ends[:singles], default=0) // self.block_size)
        is_short = max(ends[singles:], default=0) <= FEW_KEYS
        attention = [
            AttentionBatch(
                write_to=write_to,
                decode=DecodeRows(tables, slot_of[:alone], positions[:alone], blocks=blocks, apart=alone == singles)
                if alone
                else None,
                prefills=self._prefill_rows(tables, plan, singles) if self._whole_prompts else [],
                tiles=tiles and replace(tiles, tables=tables),
                each=DecodeRows(tables, slot_of, positions) if is_short and not on_gpu else None,
            )
            for tables, write_to in zip(self._tables, places, strict=True)
        ]
        return StepInputs(tokens, slot_of, positions, _grouped(attention), wanted)

    def is_adapted(self, plan: StepPlan) -> bool:
        """Whether some row of a plan goes by an adapter."""
        admitted = {admission.slot: admission.adapter for admission in plan.admissions}
        if not any(admitted.values()) and not any(self.adapters):
            return False
        return any(admitted.get(slot, self.adapters[slot]) for slot in plan.slots)

    def adapters_in(self, plan: StepPlan) -> StepAdapters | None:
        """Who goes by which adapter in a plan that has been taken in."""
        if not any(self.adapters):
            return None
        numbers = [self.adapters[slot] for slot in plan.slots]
        active = sorted(set(numbers) - {0})
        if not active:
            return None
        (of_row,) = self.send(repeated(numbers, plan.counts))
        return StepAdapters(active, of_row)

    def singles(self, plan: StepPlan) -> int:
        """The first rows of a plan, which are computed token by token, as if each were the only one of its sequence.

        A state that cannot go back takes the tokens of a row as one: there a row of drafts is like a prompt. With
        `token_by_token` prompts are computed so too: a token has the same bits however its prompt is cut.
        """
        if self.token_by_token:
            return len(plan.counts)
        of_one = plan.counts.count(1)
        return of_one + sum(wanted > 1 for wanted in plan.samples) if self._goes_back else of_one

    def send(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Whole numbers to the device in one copy that nobody waits for."""
        if self.device.type == "cpu":
            return parts
        sent = torch.cat(parts).pin_memory().to(self.device, non_blocking=True)
        return sent.split([len(part) for part in parts])

    def read(self, plan: StepPlan) -> News:
        """What the device has to know of new requests, of new blocks and of tokens that only the engine knows."""
        news = News()
        for admission in plan.admissions:
            self._seat(admission, news)
        for slot, blocks in plan.new_blocks:
            self._extend(news, 0, slot, blocks)
        for slot, window, blocks in plan.window_blocks:
            self._extend(news, window + 1, slot, blocks)
        for admission in plan.admissions:
            self._tell(news, admission.slot, 0, admission.tokens)
        for slot, position, tokens in plan.told:
            self._tell(news, slot, position, tokens)
        self.masks.take_in(plan.new_masks, self.send)
        return news

    def take_in(self, news: News) -> None:
        if news:
            (sent,) = self.send(torch.frombuffer(news.words(), dtype=torch.int64))
            self.take_in_sent(sent, len(news))

    def take_in_sent(self, words: Tensor, most: int) -> None:
        """News that are on the device, no more than so many."""
        take_in(self.tokens, self._tables, self.sampling, words, most)

    def _extend(self, news: News, group: int, slot: int, blocks: list[int]) -> None:
        held = self._held[group][slot]
        first = (group * self._tables.shape[1] + slot) * self._tables.shape[2] + len(held)
        news.add(_TABLES, range(first, first + len(blocks)), blocks)
        held += blocks

    def _tell(self, news: News, slot: int, first: int, tokens: list[int]) -> None:
        """Tokens of a slot from a position on. What was sampled there does not count."""
        size, last, held = self.block_size, first + len(tokens), self._held[0][slot]
        assert last <= len(held) * size, f"slot {slot} has no block for position {last - 1}"
        blocks = held[first // size : -(-last // size)]
        places = chain.from_iterable(range(block * size, (block + 1) * size) for block in blocks)
        news.add(_TOKENS, islice(places, first % size, first % size + len(tokens)), tokens)
        news.add(_LATEST_AT, (slot,), (NOWHERE,))

    def decode_inputs(
        self, slots: Tensor, positions: Tensor, uneven: bool, apart: bool
    ) -> tuple[Tensor, AttentionBatch]:
        """The tokens of these slots at these positions, looked up on the device alone, so that a graph can hold it."""
        tokens, places = look_up(self.tokens, self._tables, slots, positions, self.block_size)
        attention = [
            AttentionBatch(write_to, DecodeRows(tables, slots, positions, uneven, apart=apart), prefills=[])
            for tables, write_to in zip(self._tables, places, strict=True)
        ]
        return tokens, _grouped(attention)

    def room(self, slot: int) -> int:
        """Positions of a slot that have a place in the cache."""
        return min(len(held[slot]) for held in self._held) * self.block_size

    def following(self, inputs: StepInputs) -> Tensor:
        """The token behind each row, where it is known; behind the last of a sequence it may be any."""
        behind = (inputs.positions + 1).clamp(max=self._tables.shape[-1] * self.block_size - 1)
        return self.seen(inputs.slots, behind)

    @property
    def places(self) -> Cache:
        """Tokens and tables, for who guesses tokens."""
        return Cache(self.tokens.kept, self._tables, self.block_size)

    def guess_inputs(self, guess: Guess, longest: int | None) -> AttentionBatch:
        """How rows of one token each, of sequences no longer than `longest`, if that is known, meet the cache."""
        blocks = None if longest is None else min(-(-longest // self.block_size), self._tables.shape[-1])
        attention = [
            AttentionBatch(write_to, DecodeRows(tables, guess.slots, guess.positions, blocks=blocks), prefills=[])
            for tables, write_to in zip(self._tables, guess.places, strict=True)
        ]
        return _grouped(attention)

    def mixed_inputs(
        self, slots: Tensor, positions: Tensor, decode_slots: Tensor, decode_positions: Tensor, tiles: Tensor
    ) -> tuple[Tensor, AttentionBatch]:
        """The same for prompts cut into tiles, behind rows of one token."""
        cut = tiles.to(torch.int32)
        tokens, places = look_up(self.tokens, self._tables, slots, positions, self.block_size)
        attention = [
            AttentionBatch(
                write_to,
                DecodeRows(tables, decode_slots, decode_positions) if len(decode_slots) else None,
                prefills=[],
                tiles=PrefillTiles(tables, cut, resumed=True),
            )
            for tables, write_to in zip(self._tables, places, strict=True)
        ]
        return tokens, _grouped(attention)

    def _seat(self, admission: Admission, news: News) -> None:
        slot, params = admission.slot, admission.params
        for held in self._held:
            held[slot] = []
        occupant = Occupant(params, admission.prompt_length)
        self.occupants[slot] = occupant
        self.plain_from[slot] = occupant.plain_from
        self.adapters[slot] = admission.adapter
        self.is_drawn[slot] = params.temperature >= GREEDY_BELOW
        asked = pack(params.temperature, params.top_k, params.top_p, params.min_p, admission.seed)
        news.add(_SAMPLING, range(slot * PARAMETERS, (slot + 1) * PARAMETERS), asked)

    def seen(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The tokens at these positions of these slots, which are all computed, or drafts."""
        return tokens_at(self.tokens.kept, self._tables[0], slots, positions, self.block_size)

    def occupant(self, slot: int) -> Occupant:
        found = self.occupants[slot]
        assert found is not None, f"slot {slot} was never admitted"
        return found

    def _prefill_tiles(self, plan: StepPlan, singles: int) -> PrefillTiles:
        tiles, first = [], sum(plan.counts[:singles])
        for slot, start, count in zip(plan.slots[singles:], plan.starts[singles:], plan.counts[singles:], strict=True):
            tiles += tile_prompt(slot, first, count, start)
            first += count
        (sent,) = self.send(tensor_of(list(chain.from_iterable(tiles))))
        return PrefillTiles(self._tables[0], sent.to(torch.int32).view(-1, 5), resumed=any(tile[-1] for tile in tiles))

    def _prefill_rows(self, tables: Tensor, plan: StepPlan, singles: int) -> list[PrefillRow]:
        rows, first = [], sum(plan.counts[:singles])
        for slot, start, count in zip(plan.slots[singles:], plan.starts[singles:], plan.counts[singles:], strict=True):
            width = -(-(start + count) // self.block_size)
            rows.append(PrefillRow(first, count, start, tables[slot, :width].long(), slot))
            first += count
        return rows


def _tokens_of(plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and positions of all tokens of a step, and which of them yield one."""
    if plan.counts.count(1) == len(plan.counts) == sum(plan.samples):
        return torch.tensor(plan.slots), torch.tensor(plan.starts), torch.arange(len(plan.slots))
    ends = list(accumulate(plan.counts))
    yielding = [end - samples for end, samples in zip(ends, plan.samples, strict=True)]
    return (
        repeated(plan.slots, plan.counts),
        counted_on(plan.starts, plan.counts),
        counted_on(yielding, plan.samples) if any(plan.samples) else torch.tensor([ends[0] - 1]),
    )
