"""All ranks of an engine as threads of one process: the same shards, sums and plans, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.adapters import AdapterBook
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Output, Scheduler
from phalanx.engine.step_plan import Beat, StepPlan, StepResult
from phalanx.engine.whereabouts import Whereabouts
from phalanx.fabric.group import Group
from phalanx.models.adapter import AdapterOrder
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, cache_layout, load_model, make_runner
from phalanx.runtime.speculate import open_checkpoint, speculation

PATIENCE_S = 120


class Meeting:
    """Where the ranks of a group lay down what they bring."""

    def __init__(self, size: int) -> None:
        self.brought: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=PATIENCE_S)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.brought[rank] = tensor
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class ThreadGroup(Group):
    seconds = 0.0
    in_graphs = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.brought)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = torch.stack([part.clone() for part in self.meeting.exchange(self.rank, tensor)]).sum(0)
        self.meeting.barrier.wait()
        return tensor.copy_(total)

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), -1)

    def close(self) -> None:
        return None


class ThreadedRunner:
    """A runner of depth 1 that runs every step on all ranks and sees that they agree."""

    depth = 1

    def __init__(self, folder: Path, tp: int, config: EngineConfig, sizes: Sizes) -> None:
        self.nodes: list[str] = []
        checkpoint, meeting = open_checkpoint(config, folder), Meeting(tp)
        groups = [ThreadGroup(meeting, rank) for rank in range(tp)]
        models = [load_model(config, checkpoint, group, lambda done, total: None) for group in groups]
        self.ranks = [make_runner(config, model, sizes) for model in models]
        self._threads = ThreadPoolExecutor(tp)
        self._results: list[StepResult] = []

    def launch(self, plan: StepPlan) -> None:
        def run(rank: Any) -> StepResult:
            rank.launch(plan)
            return rank.collect()

        results = list(self._threads.map(run, self.ranks))
        assert all(result.tokens == results[0].tokens for result in results)
        self._results.append(results[0])

    def collect(self) -> StepResult:
        return self._results.pop(0)

    @property
    def where(self) -> Whereabouts:
        return self.ranks[0].where

    def find_break(self, slot: int, position: int) -> str:
        place, *_ = self._threads.map(lambda rank: rank.find_break(slot, position), self.ranks)
        return str(place)

    def adapt(self, order: AdapterOrder) -> None:
        for rank in self.ranks:
            rank.adapt(order)

    def beats(self) -> list[Beat]:
        return []

    def close(self) -> None:
        self._threads.shutdown()


class ThreadedEngine:
    """Prompts in, tokens out, on `tp` ranks."""

    def __init__(
        self,
        folder: Path,
        tp: int = 1,
        prefix_caching: bool = True,
        speculate: str = "off",
        invariant: bool = False,
        **limits: Any,
    ) -> None:
        usual = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40}
        asked = usual | {"max_model_len": 160} | limits
        config = EngineConfig(tp=tp, device="cpu", speculate=speculate, invariant=invariant, **asked)
        checkpoint = open_checkpoint(config, folder)
        spec = checkpoint.spec
        layout = cache_layout(config, spec, asked["max_model_len"])
        need = layout.need(-(-asked["max_model_len"] // asked["block_size"]), asked["block_size"])
        num_blocks = asked["num_blocks"] + need.windows
        if layout.token_blocks:
            num_blocks = asked["num_blocks"] * need.windows // need.whole
        sizes = Sizes(num_blocks, max_model_len=asked["max_model_len"])
        self.runner = runner = ThreadedRunner(folder, tp, config, sizes)
        pool = BlockPool(sizes.num_blocks, config.block_size, prefix_caching)
        bounds = Limits(config.max_num_seqs, config.max_num_batched_tokens, sizes.max_model_len)
        self.outputs: list[Output] = []
        scheduler = Scheduler(bounds, pool, layout=layout, speculation=speculation(config, checkpoint))
        self.engine = Engine(scheduler, runner, spec.vocab, AdapterBook(spec, config.lora_memory))

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, adapters: Sequence[str | None] = ()
    ) -> list[Any]:
        """The requests, run to their end, each by its adapter if there are some."""
        each = adapters or [None] * len(prompts)
        requests = [self.engine.add(prompt, params, adapter=name) for prompt, name in zip(prompts, each, strict=True)]
        while self.engine.has_work:
            self.outputs += self.engine.step()
        return requests

    def close(self) -> None:
        self.engine.close()
