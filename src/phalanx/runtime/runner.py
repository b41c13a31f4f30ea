"""TorchRunner: one rank's share of every step."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from phalanx.engine.marks import RankTrace
from phalanx.engine.step_plan import Beat, StepPlan, StepResult
from phalanx.engine.whereabouts import Whereabouts
from phalanx.errors import StepMemoryError
from phalanx.layers.decoder import Decoder
from phalanx.layers.watch import Canary, Finite
from phalanx.models.adapter import AdapterOrder
from phalanx.runtime.adapters import drop_adapter, hold_adapter
from phalanx.runtime.batch import Batch, StepInputs, tensor_of
from phalanx.runtime.clock import StepClock
from phalanx.runtime.draft_graphs import DraftGraphs
from phalanx.runtime.drafting import Drafts, RankDrafts
from phalanx.runtime.graphs import DecodeGraphs
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.runtime.reports import Found, Reporter, reports_of
from phalanx.runtime.sampler import Sampled, Sampler, SamplingRows
from phalanx.runtime.traced_graphs import TracedGraphs
from phalanx.runtime.tracer import Tracer
from phalanx.runtime.weight_watch import DigestReading, WeightWatch
from phalanx.spec.cache import token_blocks

_SUSPICIOUS_STEPS = 256
_MOST_TRACED = 512
_NOT_AGAIN = "no layer that could be found: computed once more, they were finite"


def digest(tokens: list[int]) -> int:
    """A fingerprint of a step's tokens, by which ranks notice that they disagree."""
    return crc32(array("q", tokens))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it stands for, says that memory ran out; a CPU has no class of its own for it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Launched(NamedTuple):
    """A step on its way. `done` comes on the device's queue behind everything else of it."""

    step: int
    rows: SamplingRows
    sampled: Sampled | None
    clock: StepClock
    done: torch.cuda.Event | None
    drafts: Drafts | None
    drafts_stay: bool
    drafted: Tensor | None
    found: Found | None
    marks: Tensor | None
    weights: DigestReading | None


class _Ran(NamedTuple):
    """The forward pass of a step: inputs and what the model made of all rows are for who makes drafts of them."""

    sampled: Sampled | None
    rows: SamplingRows
    inputs: StepInputs | None = None
    hidden: Tensor | None = None
    found: Found | None = None


class TorchRunner:
    """Runs steps on a shard of the model. Every rank samples the same tokens from the same gathered logits.

    On a GPU, whose work is queued, it goes two steps deep: the next step is launched before the tokens of this one are
    read.
    """

    def __init__(self, model: Decoder, slots: int, tokens: int, max_model_len: int, drafts: int = 0) -> None:
        self.model = model
        self.limits = (slots, tokens, max_model_len)
        self.drafts = drafts
        self.nodes: list[str] = []
        self.depth = 2 if model.place.device.type == "cuda" else 1
        spec = model.place.spec
        self.batch = Batch(
            slots,
            max_model_len,
            model.block_size,
            model.spare_block,
            model.place.device,
            groups=1 + len(spec.window_groups),
            states=spec.has_states,
            goes_back=spec.goes_back,
            whole_prompts=spec.has_states and not model.in_graphs,
            token_by_token=model.place.units is not None,
            token_blocks=0 if spec.keeps_all_tokens else token_blocks(slots, max_model_len, model.block_size),
        )
        self.graphs = DecodeGraphs(model, self.batch, hasty=drafts > 0) if DecodeGraphs.serve(model) else None
        self.prompt_graphs = None
        if self.graphs is not None and not self.batch.token_by_token:
            self.prompt_graphs = PromptGraphs(model, self.batch, self.graphs.recorder, tokens)
        self.drafting, self.draft_graphs = RankDrafts.of(model, self.batch), None
        if self.drafting is not None and self.graphs is not None and self.prompt_graphs is not None:
            self.draft_graphs = DraftGraphs(self.drafting, self.batch, self.graphs.recorder, drafts)
        self.put_off: deque[Callable[[], None]] = deque()
        self.sampler = Sampler(model.place.spec.eos_token_ids)
        self.weights: WeightWatch | None = None
        self._suspicious_steps = 0
        self.reporter = Reporter(self.batch)
        self._launched: deque[_Launched] = deque()
        self._read_at = 0.0
        self._way: tuple[bool, bool] | None = None
        """Whether the step that was launched last, and its drafts, were launched kernel by kernel."""
        self._late: StepClock | None = None
        """Of the step that was read last, if its drafts may still be on their way."""

    @property
    def where(self) -> Whereabouts:
        return self.model.place.group.where

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet collected."""
        return len(self._launched)

    @property
    def has_finished_one(self) -> bool:
        """Whether `collect` would not have to wait."""
        done = self._launched[0].done
        return done is None or done.query()

    def launch(self, plan: StepPlan) -> None:
        self.where.begin_step(plan.step)
        try:
            self._launch(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise StepMemoryError(
                "out_of_memory",
                f"Step {plan.step}, of {plan.num_tokens} tokens in {len(plan.slots)} sequences, ran out of memory on "
                f"rank {self.model.place.group.rank}: {error}",
                "Lower max_num_batched_tokens or max_num_seqs, give the KV cache less memory (kv_cache_memory), and "
                "see who else uses this memory.",
            ) from error

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> None:
        clock = StepClock(self.model.place.device, self.model.place.group)
        self._copy_states(plan.restored)
        captured = self._captured
        graphs, canary = self._graphs_for(plan), self.model.watch
        if isinstance(canary, Canary):
            canary.begin(plan.step)
        ran = self._forward(plan, clock, self.model) if graphs is None else self._replay(plan, graphs, clock)
        clock.mark()
        reading = ran.sampled.start_reading() if ran.sampled is not None else None
        drafted = self._held_drafts(plan) if plan.reread else None
        found = ran.found.start_reading() if ran.found is not None else None
        marks = canary.marks.to("cpu", copy=True, non_blocking=True) if isinstance(canary, Canary) else None
        weights = self.weights.read() if self.weights is not None else None
        done = self._moment() if plan.drafts_stay else None
        drafts = self._draft(plan, ran)
        self._copy_states(plan.saved)
        if self.drafting is not None:
            clock.mark()
        drafts = None if drafts is None or plan.drafts_stay else drafts.start_reading()
        self._judge(clock, (graphs is None, ran.inputs is not None), self._captured > captured)
        readings = (drafts, plan.drafts_stay, drafted, found, marks, weights)
        self._launched.append(_Launched(plan.step, ran.rows, reading, clock, done or self._moment(), *readings))

    @property
    def _captured(self) -> int:
        """Graphs so far."""
        return 0 if self.graphs is None else self.graphs.recorder.captured

    def _judge(self, clock: StepClock, way: tuple[bool, bool], captured: bool) -> None:
        """Whether the times of a step count. Those on their way are read later too where a capture held up this one."""
        clock.steady = not captured and self._way in (None, way)
        self._way = way
        for launched in self._launched if captured else ():
            launched.clock.steady = False

    def _moment(self) -> torch.cuda.Event | None:
        """When all that is queued so far is done."""
        return torch.cuda.current_stream().record_event() if self.model.place.device.type == "cuda" else None

    def _held_drafts(self, plan: StepPlan) -> Tensor:
        """On their way to the host: the drafts that rows of this step hold, before the next ones are made."""
        slots, positions = plan.drafted()
        tokens = self.batch.seen(*self.batch.send(tensor_of(slots), tensor_of(positions)))
        return tokens.to("cpu", non_blocking=True)

    def _draft(self, plan: StepPlan, ran: _Ran) -> Drafts | None:
        """A graph of drafts may write where that of the step left its tokens, which are on their way to the host."""
        if self.drafting is None or not plan.taken_in:
            return None
        assert ran.hidden is not None
        tokens = ran.sampled.tokens if ran.sampled else None
        if ran.inputs is None:
            assert self.draft_graphs is not None
            assert tokens is not None
            return self.draft_graphs.run(plan, ran.hidden, tokens)
        return self.drafting(plan, ran.inputs, ran.hidden, tokens)

    def _copy_states(self, places: list[tuple[int, int]]) -> None:
        if places:
            sources, targets = (list(column) for column in zip(*places, strict=True))
            source, target = self.batch.send(tensor_of(sources), tensor_of(targets))
            self.model.kept.copy(source, target, apart=set(sources).isdisjoint(targets))

    def suspect(self) -> None:
        """For some steps have the canary look at every layer, which graphs do not hold."""
        self._suspicious_steps = _SUSPICIOUS_STEPS

    def _graphs_for(self, plan: StepPlan) -> DecodeGraphs | PromptGraphs | None:
        if self._suspicious_steps and isinstance(self.model.watch, Canary):
            self._suspicious_steps -= 1
            self.model.watch.look_at_every_layer(self._suspicious_steps > 0)
            return None
        if plan.reported or self.batch.is_adapted(plan):
            return None
        return next((graphs for graphs in (self.graphs, self.prompt_graphs) if graphs and graphs.take(plan)), None)

    @torch.inference_mode()
    def rehearse(self, plan: StepPlan, model: Decoder) -> None:
        """Launch a step kernel by kernel with this model, the whole or a sketch of it. Nothing comes of it."""
        if self.batch.states:
            self._copy_states([(0, 1)])
        ran = self._forward(plan, StepClock(model.place.device, model.place.group), model)
        self._draft(plan, ran)
        if ran.sampled is not None:
            ran.sampled.start_reading()

    def _forward(self, plan: StepPlan, clock: StepClock, model: Decoder) -> _Ran:
        """A head that drafts needs all rows, whatever they yield. Those that are reported on come behind the others."""
        inputs = self.batch.prepare(plan)
        clock.mark()
        all_rows = model.draft_head is not None
        rows, reports = SamplingRows.of(plan, self.batch), reports_of(plan, self.batch)
        wanted, yielding = inputs.wanted, len(inputs.wanted)
        if reports:
            wanted = torch.cat([wanted, *self.batch.send(tensor_of([row for each in reports for row in each.rows]))])
        adapters = self.batch.adapters_in(plan)
        hidden = model(inputs.tokens, inputs.positions, inputs.attention, None if all_rows else wanted, adapters)
        looked_at = hidden[wanted] if all_rows else hidden
        found = self.reporter(model, looked_at[yielding:], reports) if reports else None
        scores = model.scores(looked_at[:yielding]) if rows else None
        clock.mark()
        sampled = self.sampler(scores, rows, self.batch) if scores is not None else None
        return _Ran(sampled, rows, inputs, hidden, found)

    def _replay(self, plan: StepPlan, graphs: DecodeGraphs | PromptGraphs, clock: StepClock) -> _Ran:
        news = self.batch.read(plan)
        rows = SamplingRows.of(plan, self.batch)
        clock.mark()
        scores, tokens, hidden = graphs.run(plan, rows, news)
        clock.mark()
        sampled = self.sampler(scores, rows, self.batch, tokens)
        laid_out = self.drafting is not None and not (self.draft_graphs and self.draft_graphs.take(plan))
        return _Ran(sampled, rows, self.batch.lay_out(plan) if laid_out and plan.taken_in else None, hidden)

    def collect(self) -> StepResult:
        step, rows, sampled, clock, done, drafts, stay, held, found, marks, weights = self._launched.popleft()
        drafted, self._late = (self._late, clock) if stay else (clock if self.drafting is not None else None, None)
        if stay and drafted is not None:
            drafted.drafting()  # made before this step was computed: read while nobody waits for the host
        if done is not None:
            self.model.place.group.wait_for(done)
        tokens, logprobs = sampled.read(rows) if sampled is not None else ([], [])
        if weights is not None and self.weights is not None:
            self.weights.check(weights)
        self.where.end_step(step)
        of_prompts = found.read() if found is not None else ([], [])
        of_stream = [] if marks is None else marks.tolist()
        made = drafts.read() if drafts is not None else []
        times, self._read_at = clock.times(self._read_at, drafted), time.perf_counter()
        in_rows = held.tolist() if held is not None else []
        told = [*of_stream, digest(tokens)]
        return StepResult(step, tokens, logprobs, times, made, *of_prompts, marks=told, drafted=in_rows)

    @torch.inference_mode()
    def find_break(self, slot: int, position: int) -> str:
        """With the tokens before it, where it may have begun: as many as a step may hold, within reason."""
        rows = 1 if self.batch.states else min(position + 1, self.limits[1], _MOST_TRACED)
        finite = Finite()
        canary, self.model.watch = self.model.watch, finite
        try:
            places = torch.arange(position + 1 - rows, position + 1)
            slots, positions = self.batch.send(torch.full_like(places, slot), places)
            tokens, attention = self.batch.decode_inputs(slots, positions, uneven=False, apart=rows == 1)
            scores = self.model.scores(self.model(tokens, positions, attention))
        finally:
            self.model.watch = canary
        return finite.broke_in() or (_NOT_AGAIN if bool(scores.isfinite().all()) else "the head")

    def adapt(self, order: AdapterOrder) -> None:
        if order.adapter is None:
            drop_adapter(self.model, order.number)
        else:
            hold_adapter(self.model, order.number, order.adapter)

    def tend(self) -> bool:
        if self.put_off:
            self.put_off.popleft()()
        return bool(self.put_off)

    def start_trace(self) -> int:
        """Decode steps run in graphs that tell their times, steps with prompts kernel by kernel."""
        self._tracer, self._usual = Tracer(self.model, self), (self.graphs, self.prompt_graphs)
        if self.graphs is not None and self._tracer.gpu is not None:
            self.graphs, self.prompt_graphs = TracedGraphs(self.graphs, self._tracer, self._tracer.gpu), None
        return len(self.model.layers) * self.model.place.group.size

    def end_trace(self) -> list[RankTrace]:
        traced, (self.graphs, self.prompt_graphs) = self.graphs, self._usual
        return [self._tracer.end(traced.replayed if isinstance(traced, TracedGraphs) else None)]

    def beats(self) -> list[Beat]:
        return []

    def close(self) -> None:
        self._launched.clear()
        self.model.place.group.close()
