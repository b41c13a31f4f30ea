"""All ranks of an engine as threads of one process: the same shards, sums and plans, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Barrier, Lock
from typing import Any, TypeVar

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
T = TypeVar("T")


class Meeting:
    """Where the ranks of a group lay down what they bring. Between meetings one computes at a time: threads that want
    the interpreter after every operation take twice as long.
    """

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, Lock()
        self._barrier = Barrier(size, timeout=PATIENCE_S)
        self._brought: list[list[Tensor]] = [[torch.empty(0)] * size for _ in range(2)]

    def exchange(self, rank: int, number: int, tensor: Tensor) -> list[Tensor]:
        """All parts of a group's `number`-th meeting. A rank may be in the next one while others still read this."""
        table = self._brought[number % 2]
        table[rank] = tensor.clone()
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return list(table)


class ThreadGroup(Group):
    seconds = 0.0
    in_graphs = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self._numbers = count()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return torch.cat(self._exchange(tensor), -1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.rank, next(self._numbers), tensor)

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
        self._turn = meeting.turn
        self._threads = ThreadPoolExecutor(tp)
        self._results: list[StepResult] = []

    def launch(self, plan: StepPlan) -> None:
        def run(rank: Any) -> StepResult:
            rank.launch(plan)
            return rank.collect()

        results = self._on_all(run)
        assert all(result.tokens == results[0].tokens for result in results)
        self._results.append(results[0])

    def _on_all(self, act: Callable[[Any], T]) -> list[T]:
        def take_turns(rank: Any) -> T:
            with self._turn:
                return act(rank)

        if len(self.ranks) == 1:
            return [take_turns(self.ranks[0])]
        return list(self._threads.map(take_turns, self.ranks))

    def collect(self) -> StepResult:
        return self._results.pop(0)

    @property
    def where(self) -> Whereabouts:
        return self.ranks[0].where

    def find_break(self, slot: int, position: int) -> str:
        return str(self._on_all(lambda rank: rank.find_break(slot, position))[0])

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
