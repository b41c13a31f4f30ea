"""Starts an engine: from a config to something that takes requests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.engine.adapters import AdapterBook
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.step_plan import Runner
from phalanx.fabric.group import Group, Solo
from phalanx.models.adapter import read_adapter
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.executor import Executor
from phalanx.runtime.rank import Sizes, agree_on_sizes, blocks_that_fit, cache_layout, load_model, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.speculate import open_checkpoint, settle, speculation
from phalanx.spec import Layout
from phalanx.spec.invariant import invariant_layout
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import Progress

SOLO = Solo()


def start_engine(config: EngineConfig, model_path: Path, progress: Progress, group: Group = SOLO) -> Engine:
    """Load the model on every rank and put a scheduler in front. What cannot work is refused before weights load.

    A `group` other than that of one is what a single rank takes for its fellows: with an `EmulatedGroup`, nobody.
    """
    config = settle(config, model_path)
    checkpoint = open_checkpoint(config, model_path)
    spec = checkpoint.spec
    (invariant_layout if config.invariant else Layout)(spec, max(config.tp, group.size))
    given = sum(read_adapter(Path(folder), spec).rank_bytes(spec) for folder in config.lora.values())
    config = msgspec.structs.replace(config, lora_memory=max(config.lora_memory, given))
    runner: Runner
    if config.tp == 1:
        runner, sizes = _start_alone(config, checkpoint, progress, group)
    else:
        executor = Executor(config, model_path, progress)
        runner, sizes = executor, executor.sizes
    pool = BlockPool(sizes.num_blocks, config.block_size, config.prefix_caching)
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, sizes.max_model_len)
    try:
        guessing = speculation(config, checkpoint)
        scheduler = Scheduler(
            limits, pool, spec.eos_token_ids, cache_layout(config, spec, sizes.max_model_len), guessing
        )
        engine = Engine(scheduler, runner, spec.vocab, AdapterBook(spec, config.lora_memory))
        for name, folder in config.lora.items():
            engine.load_adapter(name, Path(folder))
        return engine
    except Exception:
        runner.close()
        raise


def _start_alone(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress, group: Group
) -> tuple[TorchRunner, Sizes]:
    model = load_model(config, checkpoint, group, progress)
    sizes = agree_on_sizes(config, checkpoint.spec, [blocks_that_fit(config, model)])
    return make_runner(config, model, sizes), sizes
