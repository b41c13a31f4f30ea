"""Warming up: what requests would otherwise wait for is done before the first one comes, or while none is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from phalanx.runtime.draft_graphs import DraftGraphs
from phalanx.runtime.graphs import DecodeGraphs
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.runtime.rehearsal import varied_steps, worst_step
from phalanx.runtime.runner import TorchRunner

CPU_ROWS = 4
_GUESSES = 2
"""Drafts behind a step that is rehearsed: the first is made of what was taken in, the second of the first."""


class Graph(NamedTuple):
    """One of a runner's graphs, captured or not."""

    of: DecodeGraphs | PromptGraphs | DraftGraphs
    kind: Any

    def capture(self) -> None:
        self.of.capture(self.kind)

    def rehearse(self) -> None:
        self.of.rehearse(self.kind)


def graphs_of(runner: TorchRunner, kinds: Callable[[Any], Iterable[Any]]) -> list[Graph]:
    """Its graphs of these kinds, the largest of all first: then the others find room in their memory."""
    every = (runner.graphs, runner.prompt_graphs, runner.draft_graphs)
    found = [graphs for graphs in every if graphs is not None and graphs.kinds]
    largest = [Graph(graphs, graphs.kinds[0]) for graphs in found]
    return largest + [Graph(graphs, kind) for graphs in found for kind in kinds(graphs) if kind != graphs.kinds[0]]


def largest_graphs(runner: TorchRunner) -> list[Graph]:
    return graphs_of(runner, lambda graphs: [])


def first_graphs(runner: TorchRunner) -> list[Graph]:
    """In which every step can run that a graph is meant for."""
    return graphs_of(runner, lambda graphs: graphs.first_kinds)


def all_graphs(runner: TorchRunner) -> list[Graph]:
    return graphs_of(runner, lambda graphs: graphs.kinds)


def rehearse(runner: TorchRunner) -> None:
    """Run a step of every size kernel by kernel, each with a fraction of the layers, and a worst one last. Where ranks
    make drafts, each is followed by one that is taken in and one that is guessed on.

    A CPU's kernels have no sizes.
    """
    seats, tokens, longest = runner.limits
    vocab, sketch = runner.model.place.spec.vocab, runner.model.sketch()
    if runner.model.place.device.type == "cpu":
        seats, tokens = min(seats, CPU_ROWS), min(tokens, CPU_ROWS)
    ahead = min(runner.drafts, _GUESSES)
    for plan in (*varied_steps(seats, tokens, longest, vocab), worst_step(seats, tokens, longest, vocab)):
        runner.rehearse(msgspec.structs.replace(plan, ahead=ahead), sketch)


def build(rehearsal: Callable[[], None], device: torch.device, key: str) -> None:
    """Build the kernels that a rehearsal launches, many at a time. A CPU's are built when they are first called.

    A later start of an engine with the same `key` finds them on disk.
    """
    if device.type == "cuda":
        from phalanx.kernels.gpu.build import built_not_run, is_built, note_built

        if not is_built(key):
            with built_not_run(torch.get_num_threads()):
                rehearsal()
            note_built(key)


def warm_up(runner: TorchRunner, how: str) -> None:
    """See `EngineConfig.warm_up`. Every rank captures the same graphs in the same order.

    Steps are rehearsed behind them: a capture gives back the memory that steps before it have left for the next ones.
    """
    now = {"off": largest_graphs, "quick": first_graphs, "full": all_graphs}[how](runner)
    for graph in now:
        graph.capture()
    if how == "off":
        return
    for graphs in (runner.graphs, runner.prompt_graphs, runner.draft_graphs):
        if graphs is not None:
            graphs.on_demand = False
    if how == "quick":
        runner.put_off.extend(partial(Graph.capture, graph) for graph in all_graphs(runner) if graph not in now)
    rehearse(runner)
