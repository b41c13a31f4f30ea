"""Times the engine's own steps over batch sizes and prompt lengths, as measurements that a profile is fitted to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from phalanx.bench.lab.experiment import Tell, checkpoint_of
from phalanx.bench.timing import FixedBatch, time_case, time_prompts
from phalanx.engine.defaults import MAX_NUM_BATCHED_TOKENS
from phalanx.errors import ConfigError
from phalanx.models.catalog import entries
from phalanx.plan.measurements import Measurement
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import pick_device
from phalanx.runtime.start import start_engine
from phalanx.spec.machine import Gpu
from phalanx.version import __version__
from phalanx.weights.checkpoint import Checkpoint, locate, model_name

BATCHES = (1, 4, 16, 64, 256)
PROMPTS = (128, 1024, 4096)
_MOST_PROMPT_TOKENS = 2**17
"""Of a batch: more would take long and say nothing new."""
_DECODES = 32
"""Steps at least in which a batch decodes together."""
_REPEATS = 2


def calibration_gpu(config: EngineConfig) -> Gpu:
    """The GPU at hand. The planner knows none of the others, nor CPUs."""
    device = pick_device(config, 0)
    if device.type != "cuda":
        raise ConfigError(
            "no_gpu",
            "This machine has no GPU, and the planner has no data sheet of CPUs.",
            "`phalanx bench offline` and `phalanx lab` measure what a CPU does.",
        )
    return Gpu.named(torch.cuda.get_device_name(device))


def measure_steps(config: EngineConfig, gpu: Gpu, cases: list[FixedBatch], tell: Tell) -> list[Measurement]:
    """Every case that the KV cache has room for at once, on an engine of its own. A name of the catalog has random
    weights.
    """
    with checkpoint_of(config) as settled:
        name = config.model if config.model in entries() else str(locate(config.model))
        return _measure(settled, name or "", gpu, cases, tell)


def _measure(config: EngineConfig, name: str, gpu: Gpu, cases: list[FixedBatch], tell: Tell) -> list[Measurement]:
    path = locate(config.model)
    spec = Checkpoint(path, config.load_format).spec
    largest = max(case.batch for case in cases), max(case.inputs + case.outputs for case in cases)
    limits = msgspec.structs.replace(
        config, max_num_seqs=largest[0], max_model_len=min(largest[1], spec.max_positions), prefix_caching=False
    )
    short = model_name(Path(name))
    tell(f"Loading {short}")
    engine = start_engine(limits, path, lambda done, total: None)
    found = []
    try:
        pool = engine.scheduler.pool
        for case in cases:
            longest = case.inputs + case.outputs
            if longest <= spec.max_positions and case.batch * (longest + 16) <= pool.num_blocks * pool.block_size:
                tell(f"{short}: {case}")
                tpot, ttft = time_case(engine, case, _REPEATS).tpot, time_prompts(engine, case, _REPEATS)
                found.append(_measurement(case, ttft, tpot, config, gpu, name, spec.number_format))
    finally:
        engine.close()
    return found


def default_cases() -> list[FixedBatch]:
    """While the last prompts are computed, the first answers go on: they are that much longer."""
    pairs = ((batch, inputs) for batch in BATCHES for inputs in PROMPTS)
    return [
        FixedBatch(batch, inputs, 1 + _DECODES + batch * inputs // (MAX_NUM_BATCHED_TOKENS - batch))
        for batch, inputs in pairs
        if batch * inputs <= _MOST_PROMPT_TOKENS
    ]


def _measurement(
    case: FixedBatch, ttft: float, tpot: float, config: EngineConfig, gpu: Gpu, name: str, weights: str
) -> Measurement:
    return Measurement(
        engine="phalanx",
        version=__version__,
        gpu=gpu.name,
        tp=config.tp,
        ep=1,
        model=name,
        precision=weights,
        kv_dtype="fp8" if config.kv_cache_dtype == "fp8" else "bf16",
        input_tokens=case.inputs,
        output_tokens=case.outputs,
        concurrency=case.batch,
        requests=case.batch,
        ttft=ttft,
        tpot=tpot,
        spread=0.0,
        kind="burst",
        publisher="phalanx",
        state_dtype=config.state_dtype,
    )
