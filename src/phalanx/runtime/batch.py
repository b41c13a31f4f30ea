"""What a rank remembers of the batch between steps: tokens, block tables and sampling parameters by slot."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from phalanx.engine.masks import places_for
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.sampling_table import GREEDY_BELOW, PARAMETERS, TOKEN, pack
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows, PrefillTiles, tile_prompt
from phalanx.runtime.masks import Masks


def tensor_of(values: list[int]) -> Tensor:
    """torch.tensor, which for a list takes seven times as long."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


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
    """A plan as tensors. `wanted` lists the rows that yield a token, or, where none does, one that nobody will use."""

    tokens: Tensor
    positions: Tensor
    attention: AttentionBatch
    wanted: Tensor


def _grouped(batches: list[AttentionBatch]) -> AttentionBatch:
    """One for each group of layers, as one: that of the first group, which holds those of windows."""
    first, *windows = batches
    return replace(first, windows=tuple(windows)) if windows else first


class Batch:
    """The device token pool, the block tables and the sampling parameters (`sampling`, see `kernels.sampling.pack`).

    `tokens[slot, position]` holds prompts from admission on and sampled tokens from the step that made them, so the
    next step can be launched before anyone on the host has seen them. Behind the slots of requests lies one more, whose
    table points at a block that no request owns: rows that only fill up a batch go there, a whole tile of them at once.

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
    ) -> None:
        self.block_size = block_size
        self.states = states
        self.device = device
        self.occupants: list[Occupant | None] = [None] * slots
        self.plain_from = [0] * slots
        self.is_drawn = [False] * slots
        self.masks = Masks(places_for(slots), device)
        self.spare_slot = slots
        self.tokens = torch.zeros(slots + 1, max_model_len + 1, dtype=TOKEN, device=device)
        self.sampling = torch.zeros(slots + 1, PARAMETERS, dtype=torch.int64, device=device)
        width = -(-max(max_model_len, PROMPT_TILE) // block_size)
        self._tables = torch.zeros(groups, slots + 1, width, dtype=torch.int64, device=device)
        self._tables[:, slots] = spare_block
        self._table_lengths = [[0] * slots for _ in range(groups)]

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Take in what is new in the plan and lay its rows out as tensors."""
        self.update(plan)
        slots, starts, counts = (torch.tensor(column) for column in (plan.slots, plan.starts, plan.counts))
        end = counts.cumsum(0)
        first_row = end - counts
        decodes = sum(count == 1 for count in plan.counts)
        slot_of, positions, wanted, decode_slots, decode_starts = self.send(
            slots.repeat_interleave(counts),
            torch.arange(plan.num_tokens) + (starts - first_row).repeat_interleave(counts),
            (end[torch.tensor(plan.samples)] if any(plan.samples) else end[:1]) - 1,
            slots[:decodes],
            starts[:decodes],
        )
        on_gpu = self.device.type == "cuda"
        tiles = self._prefill_tiles(plan) if on_gpu and decodes < len(plan.counts) else None
        attention = [
            AttentionBatch(
                write_to=self._write_to(tables, slot_of, positions),
                decode=self._decode_rows(tables, plan, decode_slots, decode_starts) if decodes else None,
                prefills=[] if on_gpu and not self.states else self._prefill_rows(tables, plan),
                tiles=tiles and replace(tiles, tables=tables),
            )
            for tables in self._tables
        ]
        return StepInputs(self.tokens[slot_of, positions], positions, _grouped(attention), wanted)

    def _write_to(self, tables: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return tables[slots, positions // self.block_size] * self.block_size + positions % self.block_size

    def send(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Whole numbers to the device in one copy that nobody waits for."""
        if self.device.type == "cpu":
            return parts
        sent = torch.cat(parts).pin_memory().to(self.device, non_blocking=True)
        return sent.split([len(part) for part in parts])

    def update(self, plan: StepPlan) -> None:
        """Take in new requests, new masks and new blocks."""
        if plan.admissions:
            self._admit(plan.admissions)
        self.masks.take_in(plan.new_masks, self.send)
        self._extend(0, plan.new_blocks)
        for group in range(1, len(self._tables)):
            self._extend(group, [(slot, blocks) for slot, window, blocks in plan.window_blocks if window + 1 == group])

    def _extend(self, group: int, new_blocks: list[tuple[int, list[int]]]) -> None:
        lengths = self._table_lengths[group]
        rows: list[int] = []
        columns: list[int] = []
        added: list[int] = []
        for slot, blocks in new_blocks:
            length = lengths[slot]
            rows += [slot] * len(blocks)
            columns += range(length, length + len(blocks))
            added += blocks
            lengths[slot] = length + len(blocks)
        if added:
            where, at, values = self.send(tensor_of(rows), tensor_of(columns), tensor_of(added))
            self._tables[group][where, at] = values

    def decode_inputs(self, slots: Tensor, positions: Tensor, uneven: bool) -> tuple[Tensor, AttentionBatch]:
        """The tokens of these slots at these positions, looked up on the device alone, so that a graph can hold it."""
        attention = []
        for tables in self._tables:
            rows = tables[slots]
            block = rows.gather(1, (positions // self.block_size)[:, None])[:, 0]
            attention.append(
                AttentionBatch(
                    write_to=block * self.block_size + positions % self.block_size,
                    decode=DecodeRows(rows, positions, uneven, slots),
                    prefills=[],
                )
            )
        return self.tokens[slots, positions], _grouped(attention)

    def mixed_inputs(
        self, slots: Tensor, positions: Tensor, decode_slots: Tensor, decode_positions: Tensor, tiles: Tensor
    ) -> tuple[Tensor, AttentionBatch]:
        """The same for prompts cut into tiles, behind rows of one token."""
        cut = tiles.to(torch.int32)
        attention = [
            AttentionBatch(
                write_to=self._write_to(tables, slots, positions),
                decode=DecodeRows(tables[decode_slots], decode_positions, slots=decode_slots)
                if len(decode_slots)
                else None,
                prefills=[],
                tiles=PrefillTiles(tables, cut, resumed=True),
            )
            for tables in self._tables
        ]
        return self.tokens[slots, positions], _grouped(attention)

    def _admit(self, admissions: list[Admission]) -> None:
        """All of them in one copy and two writes: a step may admit as many as the batch holds."""
        lengths = torch.tensor([len(admission.tokens) for admission in admissions])
        end, slots = lengths.cumsum(0), torch.tensor([admission.slot for admission in admissions])
        asked = [pack(a.params.temperature, a.params.top_k, a.params.top_p, a.params.min_p, a.seed) for a in admissions]
        admitted, slot_of, positions, tokens, parameters = self.send(
            slots,
            slots.repeat_interleave(lengths),
            torch.arange(int(end[-1])) - (end - lengths).repeat_interleave(lengths),
            tensor_of(list(chain.from_iterable(admission.tokens for admission in admissions))),
            torch.cat(asked),
        )
        self.tokens[slot_of, positions] = tokens.to(TOKEN)
        self.sampling[admitted] = parameters.view(-1, PARAMETERS)
        for admission in admissions:
            for table_lengths in self._table_lengths:
                table_lengths[admission.slot] = 0
            occupant = Occupant(admission.params, admission.prompt_length)
            self.occupants[admission.slot] = occupant
            self.plain_from[admission.slot] = occupant.plain_from
            self.is_drawn[admission.slot] = admission.params.temperature >= GREEDY_BELOW

    def occupant(self, slot: int) -> Occupant:
        found = self.occupants[slot]
        assert found is not None, f"slot {slot} was never admitted"
        return found

    def _decode_rows(self, tables: Tensor, plan: StepPlan, slots: Tensor, starts: Tensor) -> DecodeRows:
        """A CPU looks no further than the longest of them; a GPU has one kernel for whole tables, as in graphs."""
        if self.device.type == "cuda":
            return DecodeRows(tables[slots], starts, slots=slots)
        width = max(plan.starts[: len(slots)]) // self.block_size + 1
        return DecodeRows(tables[slots, :width], starts, slots=slots)

    def _prefill_tiles(self, plan: StepPlan) -> PrefillTiles:
        tiles, first = [], 0
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if count > 1:
                tiles += tile_prompt(slot, first, count, start)
            first += count
        (sent,) = self.send(tensor_of(list(chain.from_iterable(tiles))))
        return PrefillTiles(self._tables[0], sent.to(torch.int32).view(-1, 5), resumed=any(tile[-1] for tile in tiles))

    def _prefill_rows(self, tables: Tensor, plan: StepPlan) -> list[PrefillRow]:
        rows, first = [], 0
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if count > 1:
                width = -(-(start + count) // self.block_size)
                rows.append(PrefillRow(first, count, start, tables[slot, :width], slot))
            first += count
        return rows
