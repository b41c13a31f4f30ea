"""A rank that finds no memory in the middle of a step: `python -m tests.runtime.short_rank`, as a worker is run.

SHORT_RANKS says which ranks run short and where: 1,2@STEP:LAYER.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from phalanx.engine.step_plan import StepPlan
from phalanx.layers.decoder import DecoderLayer
from phalanx.runtime import worker
from phalanx.runtime.runner import TorchRunner


def run_short(step: int, layer: int, ranks: Callable[[int], bool], patch: Callable[[Any, str, Any], None]) -> None:
    """Let this process have no memory in a layer of a step, once what lies before it has been computed and cached."""
    launch, forward = TorchRunner._launch, DecoderLayer.__call__
    now = {"step": 0, "rank": 0}

    def noted(runner: TorchRunner, plan: StepPlan) -> None:
        now.update(step=plan.step, rank=runner.model.place.group.rank)
        launch(runner, plan)

    def failing(self: DecoderLayer, *inputs: Any) -> Any:
        if now["step"] == step and ranks(now["rank"]) and self.mixer.path == f"model.layers.{layer}.self_attn.":
            raise torch.OutOfMemoryError("nothing is left, says the test")
        return forward(self, *inputs)

    patch(TorchRunner, "_launch", noted)
    patch(DecoderLayer, "__call__", failing)


if __name__ == "__main__":
    ranks, _, where = os.environ["SHORT_RANKS"].partition("@")
    step, layer = map(int, where.split(":"))
    run_short(step, layer, [int(rank) for rank in ranks.split(",")].__contains__, setattr)
    worker.main()
