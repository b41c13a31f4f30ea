"""TorchRunner: one rank's share of every step."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple
from zlib import crc32

import torch

from phalanx.engine.plan import Beat, StepPlan, StepResult
from phalanx.models.decoder import Decoder
from phalanx.runtime.batch import Batch
from phalanx.runtime.clock import StepClock
from phalanx.runtime.graphs import DecodeGraphs
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.runtime.sampler import Sampled, Sampler, SamplingRow


def digest(tokens: list[int]) -> int:
    """A fingerprint of a step's tokens, by which ranks notice that they disagree."""
    return crc32(str(tokens).encode())


class _Launched(NamedTuple):
    """A step on its way. `done` comes on the device's queue behind everything else of it."""

    step: int
    rows: list[SamplingRow]
    sampled: Sampled | None
    clock: StepClock
    done: torch.cuda.Event | None


class TorchRunner:
    """Runs steps on a shard of the model. Every rank samples the same tokens from the same gathered logits.

    On a GPU, whose work is queued, it goes two steps deep: the next step is launched before the tokens of this one are
    read.
    """

    def __init__(self, model: Decoder, slots: int, max_model_len: int) -> None:
        self.model = model
        self.nodes: list[str] = []
        self.depth = 2 if model.place.device.type == "cuda" else 1
        self.batch = Batch(slots, max_model_len, model.block_size, model.spare_block, model.place.device)
        self.graphs = DecodeGraphs(model, self.batch) if DecodeGraphs.serve(model) else None
        self.prompt_graphs = PromptGraphs(model, self.batch, self.graphs.recorder) if self.graphs is not None else None
        self.sampler = Sampler(model.place.spec.eos_token_ids)
        self._launched: deque[_Launched] = deque()

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet collected."""
        return len(self._launched)

    @property
    def has_finished_one(self) -> bool:
        """Whether `collect` would not have to wait."""
        done = self._launched[0].done
        return done is None or done.query()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        clock = StepClock(self.model.place.device, self.model.place.group)
        sampled: Sampled | None
        graphs = self._graphs_for(plan)
        if graphs is not None:
            sampled, rows = self._replay(plan, graphs, clock)
        else:
            sampled, rows = self._forward(plan, clock)
        clock.mark()
        clock.stop()
        reading = sampled.start_reading() if sampled is not None else None
        done = torch.cuda.current_stream().record_event() if self.model.place.device.type == "cuda" else None
        self._launched.append(_Launched(plan.step, rows, reading, clock, done))

    def _graphs_for(self, plan: StepPlan) -> DecodeGraphs | PromptGraphs | None:
        if self.graphs is not None and all(plan.samples) and max(plan.counts) == 1:
            return self.graphs
        return self.prompt_graphs if self.prompt_graphs is not None and self.prompt_graphs.take(plan) else None

    def _forward(self, plan: StepPlan, clock: StepClock) -> tuple[Sampled | None, list[SamplingRow]]:
        inputs = self.batch.prepare(plan)
        clock.mark()
        hidden = self.model(inputs.tokens, inputs.positions, inputs.attention, inputs.wanted)
        rows = self._sampling_rows(plan)
        scores = self.model.scores(hidden) if rows else None
        clock.mark()
        return self.sampler(scores, rows, self.batch) if scores is not None else None, rows

    def _replay(
        self, plan: StepPlan, graphs: DecodeGraphs | PromptGraphs, clock: StepClock
    ) -> tuple[Sampled, list[SamplingRow]]:
        self.batch.update(plan)
        rows = self._sampling_rows(plan)
        clock.mark()
        scores, tokens = graphs.run(plan, drawn=any(row.is_drawn and row.is_plain for row in rows))
        clock.mark()
        return self.sampler(scores, rows, self.batch, tokens), rows

    def _sampling_rows(self, plan: StepPlan) -> list[SamplingRow]:
        rows, masks = [], dict(plan.masks)
        columns = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
        for index, (slot, start, count, sampled) in enumerate(columns):
            occupant = self.batch.occupants[slot]
            assert occupant is not None, f"slot {slot} was never admitted"
            if sampled:
                rows.append(SamplingRow(occupant, slot, start + count, masks.get(index)))
        return rows

    def collect(self) -> StepResult:
        step, rows, sampled, clock, done = self._launched.popleft()
        if done is not None:
            self.model.place.group.wait_for(done)
        tokens, logprobs = sampled.read(rows) if sampled is not None else ([], [])
        return StepResult(step, tokens, logprobs, clock.times())

    def beats(self) -> list[Beat]:
        return []

    def close(self) -> None:
        self._launched.clear()
        self.model.place.group.close()
