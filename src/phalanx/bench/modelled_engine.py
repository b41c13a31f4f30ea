"""An engine process whose runner answers at once: what is left to measure is the API process."""

from __future__ import annotations

from pathlib import Path

from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.runtime.config import EngineConfig
from phalanx.server.engine_process import main
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import Progress

_CONTEXT = 8192
_ORDINARY_TOKENS = range(1000, 9000)


def start_modelled(config: EngineConfig, model_path: Path, progress: Progress) -> Engine:
    """The real scheduler in front of no model: a step takes no time, its tokens are ordinary words."""
    spec = Checkpoint(model_path, config.load_format).spec
    length = config.max_model_len or min(spec.max_positions, _CONTEXT)
    pool = BlockPool(config.max_num_seqs * -(-length // config.block_size), config.block_size, config.prefix_caching)
    runner = ModelledRunner(
        price=lambda plan: 0.0,
        token=lambda slot, position: _ORDINARY_TOKENS[(31 * slot + 17 * position) % len(_ORDINARY_TOKENS)],
    )
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, length)
    return Engine(Scheduler(limits, pool, spec.eos_token_ids), runner, spec.vocab)


if __name__ == "__main__":
    main(start_modelled)
