"""Traced steps on a GPU of which only the queue is there: what is launched computes nothing, but stamps, in virtual
time. Run by tests/trace/test_stamps.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.kernels import Builder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.engine.marks import CALL_ENDS, PLACE, SAMPLED, SAMPLING, RankTrace, StepMarks
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.engine.whereabouts import ALL_REDUCE, EMBEDDING, GATHER, HEAD
from phalanx.fabric.emulated import EmulatedGroup
from phalanx.fabric.group import Group, Solo
from phalanx.fabric.nccl import NcclGroup
from phalanx.fabric.peer import PeerGroup
from phalanx.kernels.gpu import router, stamps
from phalanx.kernels.gpu.all_reduce import Peers
from phalanx.kernels.gpu.build import _EmptyIsZero
from phalanx.layers.decoder import Decoder
from phalanx.layers.mixers import delta
from phalanx.layers.place import Place
from phalanx.models import read_config
from phalanx.runtime import graphs, moments, tracer
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.graphs import DecodeGraphs, Recorded
from phalanx.runtime.rank import Sizes, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.spec import Layout
from phalanx.spec.delta import updates_beside
from tests.conftest import tiny_config

CPU = torch.device("cpu")
STAMPS = ("stamp", "begins", "ends")
NOT_LAUNCHED = {
    "alias", "as_strided", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "flatten",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""What torch does without a kernel."""


class Clocks:
    """The host's, at whose every reading a us passes, and the GPU's, which is ahead."""

    AHEAD = 10**15

    def __init__(self) -> None:
        self.now = 10**9

    def monotonic_ns(self) -> int:
        self.now += 1000
        return self.now

    def globaltimer(self) -> int:
        return self.monotonic_ns() + self.AHEAD


class Graph:
    """Writes what its kernels would, anew at every replay."""

    def __init__(self) -> None:
        self.writes: list[Callable[[], None]] = []

    def replay(self) -> None:
        for write in self.writes:
            write()


class Queue(Builder):
    """In the place of launches. `late` names what was launched while a moment waited for its kernel: had that one
    stamped, or a later one, it would have been too late. `stampers` are those that did.
    """

    def __init__(self, clocks: Clocks) -> None:
        super().__init__(capability=90)
        self.clocks = clocks
        self.late: list[str] = []
        self.stampers: list[str] = []
        self.capturing: Graph | None = None

    def launched(self, name: str) -> None:
        if stamps.is_wanted():
            self.late.append(name)

    def build(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.launched(kernel.__name__)
        given = dict(zip((each.name for each in kernel.params), args, strict=False))
        if kernel.__name__ == "_stamp":
            self.stamp("stamp", kernel.__name__, given["place"])
        for name in STAMPS:
            if given.get(name) is not None:
                self.stamp(name, kernel.__name__, given[name])

    def stamp(self, name: str, kernel: str, place: Tensor) -> None:
        """Only collectives have an end; which others write one too, nobody asks."""
        assert place.data_ptr() % 16 == 0

        def write() -> None:
            if name != "ends":
                place[0] = self.clocks.globaltimer()
            if name != "begins":
                place[1] = self.clocks.globaltimer()

        self.stampers.append(kernel)
        if self.capturing is None:
            write()
        else:
            self.capturing.writes.append(write)

    def record(self, recorder: Any, rehearse: Callable[[], Any], run: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        rehearse()
        self.stampers.clear()
        self.capturing = graph = Graph()
        results = run()
        self.capturing = None
        return Recorded(graph, results)  # type: ignore[arg-type]

    @contextmanager
    def in_place_of_a_gpu(self) -> Iterator[None]:
        stream = SimpleNamespace(synchronize=lambda: None, record_event=lambda: stream)
        on_gpu = moments.GpuMoments
        with (
            patch.object(torch.Tensor, "is_cuda", True),
            patch.object(torch.cuda, "current_stream", lambda: stream),
            patch.object(graphs.Recorder, "__call__", lambda *given: self.record(*given)),
            patch.object(tracer, "moments_of", lambda model: on_gpu(CPU, moments.told_by_norms(model))),
            patch.object(moments, "time", self.clocks),
            patch.object(tracer, "time", self.clocks),
            self.in_place_of_launches(),
            _EmptyIsZero(),
            _Operations(self),
        ):
            yield


class _Operations(TorchDispatchMode):
    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if name not in NOT_LAUNCHED:
            self._queue.launched(name)
        return operation(*args, **(options or {}))


class Nccl:
    """Launches kernels that others wrote."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def allreduce(self, *given: Any) -> None:
        self._queue.launched("nccl")

    _allgather_base = allreduce


def groups(queue: Queue) -> dict[str, Group]:
    nccl, peer = NcclGroup(0, 2, CPU), PeerGroup(0, 2, CPU, None)
    nccl._group = Nccl(queue)  # type: ignore[assignment]
    peer._peers = Peers(0, 2, torch.zeros(2, dtype=torch.int64))
    return {"solo": Solo(), "emulated": EmulatedGroup(2, lambda size: 0.0, CPU), "peer": peer, "nccl": nccl}


def runner_of(family: str, group: Group) -> TorchRunner:
    spec = read_config(tiny_config(family).to_dict())
    with patch.object(torch.Tensor, "is_cuda", True), patch.object(router, "processors", lambda device: 132):
        model = Decoder(Place(Layout(spec, group.size), group, torch.bfloat16, CPU, quantised=True))
    for _, part in model.parts():
        assert isinstance(part, Tensor)
        part.zero_()
    config = EngineConfig(max_num_seqs=2, dtype="bf16", warm_up="off", canary=False)
    runner = make_runner(config, model, Sizes(num_blocks=40, max_model_len=64))
    runner.graphs = DecodeGraphs(model, runner.batch)
    return runner


def decode(step: int, position: int) -> StepPlan:
    return StepPlan(step, [], [0], [position], [1], [1], [])


def traced_steps(queue: Queue, runner: TorchRunner) -> RankTrace:
    """One, two that are on their way at once, and one that is not collected. The first waits for its graph."""
    admission = Admission(0, 1, [5], 0, SamplingParams(temperature=0))
    groups = range(len(runner.model.place.spec.window_groups))
    windows = [(0, group, [20 + 3 * group + at for at in range(3)]) for group in groups]
    first = StepPlan(1, [admission], [0], [0], [1], [1], [(0, [0, 1, 2])], window_blocks=windows)
    with queue.in_place_of_a_gpu():
        runner.start_trace()
        runner.launch(first)
        runner.collect()
        runner.launch(decode(2, 1))
        runner.launch(decode(3, 2))
        runner.collect()
        runner.collect()
        runner.launch(decode(4, 3))
        (trace,) = runner.end_trace()
    assert not stamps.is_wanted()
    assert "launch" not in vars(runner)
    return trace


def check_marks(step: StepMarks, layers: int, ranks: int) -> None:
    """As many as the model has parts, in order, in the host's time."""
    times = [mark.time for mark in step.marks]
    assert times == sorted(times)
    assert step.begun < times[0] < times[-1] < step.ended
    places = [mark for mark in step.marks if mark.what == PLACE]
    assert [mark.value for mark in places] == [EMBEDDING, *range(2 * layers), HEAD, SAMPLING, SAMPLED]
    assert len({mark.time for mark in places}) == len(places)
    calls = [mark for mark in step.marks if mark.what in (ALL_REDUCE, GATHER)]
    ends = [mark for mark in step.marks if mark.what == CALL_ENDS]
    assert all(begin.time < end.time for begin, end in zip(calls, ends, strict=True))
    assert len(calls) >= (2 * layers + 2 if ranks > 1 else 0)
    assert [mark.what for mark in calls[-1:]] == [GATHER] * (ranks > 1)


def check(family: str, kind: str, only_stamps: int, in_graphs: bool = True) -> None:
    """So many kernels of a graph do nothing but stamp."""
    queue = Queue(Clocks())
    group = groups(queue)[kind]
    with patch.object(delta, "_updates_kept", lambda record, device: updates_beside(max(1, record.pending))):
        runner = runner_of(family, group)
    runner.graphs = runner.graphs if in_graphs else None
    trace = traced_steps(queue, runner)
    assert not queue.late, queue.late
    assert [step.step for step in trace.steps] == ([2, 3] if in_graphs else [1, 2, 3])
    assert trace.in_graphs == (4 if in_graphs else None)
    if in_graphs:
        behind_graphs = trace.in_graphs
        assert queue.stampers.count("_stamp") == only_stamps + behind_graphs
    for step in trace.steps:
        check_marks(step, len(runner.model.layers), group.size)
    second, third = trace.steps[-2:]
    assert second.marks[-1].time < third.marks[0].time


FEW = {"solo": 2, "emulated": 2, "peer": 2, "nccl": 15}
"""The embedding and what follows on the scores; NCCL's own calls have one before and, but for norms, one behind."""
EACH_HALF = {"solo": 10, "emulated": 10, "peer": 10, "nccl": 38}
WITH_STREAMS = {"solo": 11, "emulated": 11, "peer": 11, "nccl": 31}
AFTER_NORMS = FEW | {"nccl": 22}
FAMILIES = {
    "llama": FEW, "qwen3_moe": FEW, "qwen3_next": FEW, "deepseek_v32": FEW, "gemma3_text": AFTER_NORMS,
    "olmo2": EACH_HALF, "deepseek_v4": WITH_STREAMS,
}  # fmt: skip

if __name__ == "__main__":
    for family, expected in FAMILIES.items():
        for kind, only_stamps in expected.items():
            check(family, kind, only_stamps)
    check("llama", "solo", 0, in_graphs=False)
    check("llama", "peer", 0, in_graphs=False)
