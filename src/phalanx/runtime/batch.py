"""What a rank remembers of the batch between steps: tokens, block tables and sampling parameters by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.plan import Admission, StepPlan
from phalanx.engine.sampling import SamplingParams
from phalanx.kernels.attention import AttentionBatch, DecodeRows, PrefillRow


@dataclass(frozen=True)
class Occupant:
    """The request in a slot."""

    params: SamplingParams
    seed: int
    prompt_length: int


@dataclass(frozen=True)
class StepInputs:
    """A plan as tensors. `sampled` lists the rows of the hidden states that yield a token."""

    tokens: Tensor
    positions: Tensor
    attention: AttentionBatch
    sampled: Tensor


class Batch:
    """The device token pool and the block tables.

    `tokens[slot, position]` holds prompts from admission on and sampled tokens from the step that made them, so the
    next step can be launched before anyone on the host has seen them. Behind the slots of requests lies one more, whose
    table points at a block that no request owns: rows that only fill up a batch go there.
    """

    def __init__(self, slots: int, max_model_len: int, block_size: int, spare_block: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.occupants: list[Occupant | None] = [None] * slots
        self.spare_slot = slots
        self.tokens = torch.zeros(slots + 1, max_model_len + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(slots + 1, -(-max_model_len // block_size), dtype=torch.int64, device=device)
        self._tables[slots] = spare_block
        self._table_lengths = [0] * slots

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Take in what is new in the plan and lay its rows out as tensors."""
        self.update(plan)
        slots = torch.tensor(plan.slots, device=self.device)
        starts = torch.tensor(plan.starts, device=self.device)
        counts = torch.tensor(plan.counts, device=self.device)
        slot_of = slots.repeat_interleave(counts)
        first_row = counts.cumsum(0) - counts
        positions = torch.arange(plan.num_tokens, device=self.device) + (starts - first_row).repeat_interleave(counts)
        block = self._tables[slot_of, positions // self.block_size]
        attention = AttentionBatch(
            write_to=block * self.block_size + positions % self.block_size,
            decode=self._decode_rows(plan, slots, starts),
            prefills=self._prefill_rows(plan),
        )
        sampled = (first_row + counts - 1)[torch.tensor(plan.samples, device=self.device)]
        return StepInputs(self.tokens[slot_of, positions], positions, attention, sampled)

    def update(self, plan: StepPlan) -> None:
        """Take in new requests and new blocks."""
        for admission in plan.admissions:
            self._admit(admission)
        for slot, blocks in zip(plan.slots, plan.new_blocks, strict=True):
            self._extend_table(slot, blocks)

    def decode_inputs(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, AttentionBatch]:
        """The tokens of these slots at these positions, looked up on the device alone, so that a graph can hold it."""
        tables = self._tables[slots]
        block = tables.gather(1, (positions // self.block_size)[:, None])[:, 0]
        attention = AttentionBatch(
            write_to=block * self.block_size + positions % self.block_size,
            decode=DecodeRows(tables, positions),
            prefills=[],
        )
        return self.tokens[slots, positions], attention

    def _admit(self, admission: Admission) -> None:
        tokens = torch.tensor(admission.tokens, device=self.device)
        self.tokens[admission.slot, : len(tokens)] = tokens
        self._table_lengths[admission.slot] = 0
        self.occupants[admission.slot] = Occupant(admission.params, admission.seed, admission.prompt_length)

    def _extend_table(self, slot: int, blocks: list[int]) -> None:
        if blocks:
            length = self._table_lengths[slot]
            self._tables[slot, length : length + len(blocks)] = torch.tensor(blocks, device=self.device)
            self._table_lengths[slot] = length + len(blocks)

    def _decode_rows(self, plan: StepPlan, slots: Tensor, starts: Tensor) -> DecodeRows | None:
        rows = sum(count == 1 for count in plan.counts)
        if rows == 0:
            return None
        width = max(plan.starts[:rows]) // self.block_size + 1
        return DecodeRows(self._tables[slots[:rows], :width], starts[:rows])

    def _prefill_rows(self, plan: StepPlan) -> list[PrefillRow]:
        rows, first = [], 0
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if count > 1:
                width = -(-(start + count) // self.block_size)
                rows.append(PrefillRow(first, count, start, self._tables[slot, :width]))
            first += count
        return rows
