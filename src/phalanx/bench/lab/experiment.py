"""The experiment: one case at several TP degrees, each with what the plan expected of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from phalanx.bench.ceilings import Ceilings, measure_ceilings
from phalanx.bench.emulate import SecondsOf, fabric_of, free_memory, parse_degrees, step_collectives
from phalanx.bench.lab.point import LabPoint, PlannedPoint, Waiting, point_of
from phalanx.bench.offline import least_work
from phalanx.bench.timing import FixedBatch, Timing, time_case, time_prompts
from phalanx.cost.work import RankWork
from phalanx.engine.core import Engine
from phalanx.errors import ConfigError, PhalanxError
from phalanx.fabric.emulated import EmulatedGroup
from phalanx.fabric.group import Group
from phalanx.models.catalog import entries
from phalanx.plan.predict import Predictor, predictor
from phalanx.plan.price import Tariff, cost
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import held_weights
from phalanx.runtime.rank import pick_device, pick_dtype
from phalanx.runtime.start import SOLO, start_engine
from phalanx.spec import Layout, ModelSpec
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.workload import Workload
from phalanx.weights.checkpoint import Checkpoint, locate, model_name

Tell = Callable[[str], None]

_REPEATS = 2


@dataclass(frozen=True)
class Experiment:
    """What to try. What is None is chosen by where it runs: much on a GPU, little on CPUs. Runs are repeated until so
    many `iterations`, steps in which all requests decode, are timed.
    """

    config: EngineConfig
    degrees: str | None = None
    batch: int | None = None
    inputs: int | None = None
    outputs: int | None = None
    iterations: int | None = None
    warm_up: int | None = None
    emulate: bool = False
    machine: str | None = None
    all_reduce_us: float | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True)
class Lab:
    """The results, in order of TP. `fabric` says where the times of collectives are from."""

    model: str
    device: str
    case: str
    fabric: str
    random_weights: bool
    ceilings: Ceilings
    points: list[LabPoint]
    on_gpus: bool


def run_lab(asked: Experiment, tell: Tell) -> Lab:
    """Measure every degree. Those that the model cannot be dealt to are refused before anything loads."""
    with checkpoint_of(asked.config) as config:
        path = locate(config.model)
        checkpoint, device = Checkpoint(path, config.load_format), pick_device(config, 0)
        spec = checkpoint.spec
        case, iterations, warm_up = _case(asked, device.type == "cuda")
        degrees = _degrees(asked, device)
        for tp in degrees:
            Layout(spec, tp)
        tell("Measuring the machine")
        bench = _Bench(
            asked,
            msgspec.structs.replace(config, max_num_seqs=case.batch, prefix_caching=False),
            checkpoint,
            device,
            case,
            iterations,
            warm_up,
            measure_ceilings(device, pick_dtype(config, spec, device), held_weights(config, checkpoint, device).scheme),
            tell,
        )
        points: list[LabPoint] = []
        for tp in degrees:
            points.append(bench.point(tp, points[0] if points else None))
        name = asked.config.model if asked.config.model in entries() else model_name(path)
        return Lab(
            model=name or "",
            device=bench.ceilings.device,
            case=str(case),
            fabric=bench.fabric,
            random_weights=config.load_format == "dummy",
            ceilings=bench.ceilings,
            points=points,
            on_gpus=device.type == "cuda",
        )


@contextmanager
def checkpoint_of(config: EngineConfig) -> Iterator[EngineConfig]:
    """A model of the catalog that is given by its name is built from its configuration, with random weights."""
    entry = entries().get(config.model or "")
    if entry is None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-lab-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(entry.config)))
        yield msgspec.structs.replace(config, model=folder, load_format="dummy")


def _case(asked: Experiment, on_gpu: bool) -> tuple[FixedBatch, int, int]:
    usual = (32, 1024, 256, 100, 20) if on_gpu else (4, 64, 16, 12, 2)
    given = asked.batch, asked.inputs, asked.outputs, asked.iterations, asked.warm_up
    batch, inputs, outputs, iterations, warm_up = (
        own if own is not None else default for own, default in zip(given, usual, strict=True)
    )
    return FixedBatch.parse(f"{batch}x{inputs}x{outputs}"), iterations, warm_up


def _degrees(asked: Experiment, device: torch.device) -> list[int]:
    most = 8 if asked.emulate else torch.cuda.device_count() if device.type == "cuda" else 2
    default = [degree for degree in (1, 2, 4, 8) if degree <= most]
    degrees = parse_degrees(asked.degrees, "--tp") if asked.degrees is not None else default
    if device.type == "cuda" and not asked.emulate and max(degrees) > torch.cuda.device_count():
        raise ConfigError(
            "too_few_gpus",
            f"TP={max(degrees)}, but {torch.cuda.device_count()} GPUs are visible.",
            "Add --emulate: one rank's real share on one GPU, with the waiting of a modelled fabric.",
        )
    return degrees


@dataclass
class _Bench:
    """What all degrees have in common."""

    asked: Experiment
    config: EngineConfig
    checkpoint: Checkpoint
    device: torch.device
    case: FixedBatch
    iterations: int
    warm_up: int
    ceilings: Ceilings
    tell: Tell
    fabric: str = "no ranks wait for each other"

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def point(self, tp: int, base: LabPoint | None) -> LabPoint:
        seconds_of = self._seconds_of(tp)
        group: Group = SOLO
        config = msgspec.structs.replace(self.config, tp=tp)
        if self.asked.emulate:
            config = self.config
            if seconds_of is not None:
                group = EmulatedGroup(tp, seconds_of, self.device)
        self.tell(f"TP={tp}: loading")
        engine = start_engine(config, self.checkpoint.path, lambda done, total: None, group)
        try:
            self.tell(f"TP={tp}: measuring {self.case}")
            timing = time_case(engine, self.case, _REPEATS, warm_up=self.warm_up, iterations=self.iterations)
            alone = time_prompts(engine, replace(self.case, batch=1), _REPEATS)
            kv_tokens = engine.scheduler.pool.num_blocks * engine.scheduler.pool.block_size
            waiting = self._waiting(timing, seconds_of, engine)
        finally:
            engine.close()
            del engine
            free_memory(self.device)
        work = self._work(msgspec.structs.replace(self.config, tp=tp))
        longest = min(self.spec.max_positions, kv_tokens // self.case.batch)
        return point_of(
            tp, self.case, timing, alone, work, self.ceilings, waiting, (kv_tokens, longest), self._usd(tp), base,
            self._planned(tp), on_gpu=self.device.type == "cuda",
        )  # fmt: skip

    def _work(self, config: EngineConfig) -> RankWork:
        """Of one rank on its own device, or of all that share the CPUs."""
        together = self.device.type == "cpu" and not self.asked.emulate
        held = held_weights(config, self.checkpoint, self.device, all_ranks=together)
        return least_work(self.spec, held, config, self.device)

    def _seconds_of(self, tp: int) -> SecondsOf | None:
        """What a collective takes; None where the ranks' own clocks say it."""
        if tp == 1 or (not self.asked.emulate and self.device.type == "cpu"):
            if tp > 1:
                self.fabric = "by the clocks of the ranks"
            return None
        seconds_of, self.fabric = fabric_of(tp, self.asked.all_reduce_us, self.asked.machine, self.device)
        return seconds_of

    def _waiting(self, timing: Timing, seconds_of: SecondsOf | None, engine: Engine) -> Waiting:
        """Seconds of a decode step and of the steps until all have their first token in collectives. GPUs do not tell
        them apart: there they are those of steps that hold prompts alone.
        """
        if seconds_of is None or self.device.type == "cpu":
            return Waiting(timing.decode_clocks.all_reduce / timing.steps, timing.prompt_clocks.all_reduce)
        element, inputs = pick_dtype(self.config, self.spec, self.device).itemsize, self.case.inputs
        tokens, budget = self.case.batch * inputs, engine.scheduler.limits.max_num_batched_tokens
        prompts = 0.0
        for begun in range(0, tokens, budget):
            end = min(begun + budget, tokens)
            ended = end // inputs - begun // inputs
            prompts += step_collectives(self.spec, end - begun, element, seconds_of, gathered=ended)
        return Waiting(step_collectives(self.spec, self.case.batch, element, seconds_of), prompts)

    def _usd(self, tp: int) -> float | None:
        """An hour of all ranks' GPUs."""
        if self.asked.usd_per_hour is not None:
            return tp * self.asked.usd_per_hour
        gpu = self._gpu()
        return None if gpu is None else cost(Machine((gpu,) * tp), Tariff()).hourly

    def _gpu(self) -> Gpu | None:
        if self.device.type != "cuda":
            return None
        try:
            return Gpu.named(torch.cuda.get_device_name(self.device))
        except PhalanxError:
            return None

    def _planned(self, tp: int) -> PlannedPoint | None:
        """By the planner's model of these GPUs. Of CPUs it has none: there the measured limits stand alone."""
        gpu = self._gpu()
        if gpu is None:
            return None
        machine, case = Machine((gpu,) * tp), self.case
        load = Workload(case.inputs, case.outputs, case.batch, requests=case.batch)
        made: Predictor = predictor(self.spec, machine, tp, "phalanx", load)
        decode, prompts = made.seconds(case.decode_step), made.seconds(case.prompts)
        return PlannedPoint(prompts.mid, decode.mid, decode.low, decode.high, made.cost(case.decode_step).all_reduce)
