"""Some steps of a fixed batch, traced, and what tracing them cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import msgspec

from phalanx.bench.timing import settled_memory
from phalanx.engine.core import Engine
from phalanx.engine.marks import StepTraces
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.tracing import EngineTracer
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.start import start_engine
from phalanx.weights.checkpoint import locate

_TURNS = 4
"""How often steps are timed without and with tracing, in turn."""


@dataclass(frozen=True)
class TracedBatch:
    """`slowdown`: the median time of traced steps to that of steps between them; None where only prompts were."""

    traces: StepTraces
    slowdown: float | None


def trace_batch(
    config: EngineConfig, batch: int, inputs: int, steps: int, prompts: bool, tell: Callable[[str], None]
) -> TracedBatch:
    """Trace decode steps of a batch, or its prompts and what follows."""
    outputs = (2 * _TURNS + 2) * steps
    limits = msgspec.structs.replace(
        config, max_num_seqs=batch, max_model_len=inputs + outputs + 1, prefix_caching=False
    )
    tell("Loading")
    engine = start_engine(limits, locate(config.model), progress=lambda done, total: None)
    try:
        with settled_memory():
            tell("Warming up")
            _fill(engine, batch, inputs, steps, seed=0)
            _steps(engine, 2 * steps)
            for request in list(engine.scheduler.requests.values()):
                engine.cancel(request.id)
            _steps(engine, 1)
            _fill(engine, batch, inputs, outputs, seed=1)
            tell("Tracing")
            if prompts:
                return TracedBatch(_trace(engine, steps), None)
            return _decodes(engine, steps)
    finally:
        engine.close()


def _fill(engine: Engine, batch: int, inputs: int, outputs: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(batch):
        prompt = [rng.randrange(engine.vocab) for _ in range(inputs)]
        engine.add(prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs))


def _decodes(engine: Engine, steps: int) -> TracedBatch:
    while any(request.computed < request.prompt_length for request in engine.scheduler.requests.values()):
        engine.step()
    plain: list[float] = []
    traced: list[float] = []
    for _ in range(_TURNS):
        plain += _steps(engine, steps)
        found = _trace(engine, steps, traced)
    return TracedBatch(found, median(traced) / median(plain))


def _trace(engine: Engine, steps: int, times: list[float] | None = None) -> StepTraces:
    """The times do not hold the end, when ranks tell what they have: it is behind the steps."""
    tracer = EngineTracer(engine, steps + 1, lambda traces: None)
    taken = _steps(engine, steps)
    if times is not None:
        times += taken
    return tracer.end()


def _steps(engine: Engine, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return times
