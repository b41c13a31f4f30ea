"""Executor: rank 0 in this process, the other ranks beside it or on other machines."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from pathlib import Path

import msgspec
import torch

from phalanx.engine.agreement import disagreement
from phalanx.engine.hang import RankSeen, position, who_waits
from phalanx.engine.marks import RankTrace
from phalanx.engine.step_plan import Beat, StepPlan, StepResult
from phalanx.engine.whereabouts import Whereabouts, read_pages
from phalanx.errors import EngineDeadError, PhalanxError, StepLostError, StepMemoryError
from phalanx.fabric.group import FabricError, Group, Solo
from phalanx.models.adapter import AdapterOrder
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.cores import use_cores
from phalanx.runtime.messages import (
    CONNECT,
    END_TRACE,
    FIND_BREAK,
    GO_ON,
    PING,
    SUSPECT,
    TEND,
    TRACE,
    CacheRoom,
    Done,
    Pong,
    RankReady,
    Short,
    encode,
    pack_adapter,
    pack_plan,
)
from phalanx.runtime.rank import Sizes, agree_on_sizes, blocks_that_fit, learn_pace, load_model, make_group, make_runner
from phalanx.runtime.speculate import open_checkpoint
from phalanx.runtime.tracer import ahead_by_pings
from phalanx.runtime.workers import LocalWorkers, Workers
from phalanx.weights.load import Progress

_POLL_MS = 100
_PINGS = 20
_SHORT_WITHIN_S = 10.0
"""How long rank 0, when it has no memory for a step, waits to hear the same from the others."""
_FABRIC = (
    "A link, a rank's memory or its software is not to be trusted: look at ECC and link errors (dmesg, nvidia-smi) and "
    "at versions; phalanx doctor --measure compares sums rank by rank."
)
_AGAIN = "Start the engine again; if it recurs, run the same request with tp=1 to tell the rank from the model."


def start_workers(config: EngineConfig, model_path: Path) -> Workers:
    """The other ranks, where the config wants them."""
    if config.executor == "local":
        return LocalWorkers(config, model_path)
    from phalanx.runtime.ray_workers import RayWorkers

    return RayWorkers(config, model_path)


class Executor:
    """A runner over all ranks: hands the plan to the others, runs rank 0's share itself.

    When any rank dies, raises or samples other tokens than rank 0, all of them are stopped and EngineDeadError says
    which rank it was and why; so does every later call.
    """

    def __init__(self, config: EngineConfig, model_path: Path, progress: Progress) -> None:
        self._threads_before = torch.get_num_threads()
        self._dead: EngineDeadError | None = None
        self._loaded: list[int] = []
        self._blocks: dict[int, int] = {}
        self._short: dict[int, Short] = {}
        self._traces: list[RankTrace] = []
        self._pongs: dict[int, tuple[int, int]] = {}
        self._marks: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        self._last_step = 0
        self._doubtful_until: int | None = None
        self._group: Group = Solo()
        self.workers = start_workers(config, model_path)
        self.nodes = self.workers.nodes
        use_cores(self.workers.spot.ranks_here)
        try:
            self.sizes = self._start(model_path, progress)
        except BaseException as error:
            failed = self._stop(error) if not isinstance(error, PhalanxError | KeyboardInterrupt) else error
            self.close()
            raise failed from error

    def _start(self, model_path: Path, progress: Progress) -> Sizes:
        config, spot = self.workers.config, self.workers.spot
        checkpoint = open_checkpoint(config, model_path)
        self._group = group = make_group(config, 0, spot)
        if self.workers.pages is not None:
            group.where = Whereabouts.in_file(self.workers.pages, 0)
        model = load_model(config, checkpoint, group, progress, spot)
        while len(self._loaded) < config.tp - 1:
            self._hear(_POLL_MS)
        self.workers.send(CONNECT)
        group.connect(self.workers.store(), self.workers.host, self._check_peers)
        learn_pace(config, model, self.workers.host)
        self._blocks[0] = blocks_that_fit(config, model, spot)
        while len(self._blocks) < config.tp:
            self._hear(_POLL_MS)
        sizes = agree_on_sizes(config, checkpoint.spec, list(self._blocks.values()))
        self.workers.send([encode(sizes)])
        self.runner = make_runner(config, model, sizes)
        self.depth = self.runner.depth
        self.workers.started()
        return sizes

    @property
    def where(self) -> Whereabouts:
        return self._group.where

    def launch(self, plan: StepPlan) -> None:
        self._check_alive()
        self._last_step = plan.step
        try:
            self.workers.send(pack_plan(plan))
            self.runner.launch(plan)
        except Exception as error:
            if isinstance(error, StepMemoryError) and self._all_are_short():
                raise
            raise self._stop(error) from error

    def collect(self) -> StepResult:
        self._check_alive()
        try:
            result = self.runner.collect()
            self._agree(result)
        except StepLostError:
            raise
        except Exception as error:
            raise self._stop(error) from error
        return result

    def _agree(self, result: StepResult) -> None:
        """Wait until every rank has told its digests of this step, and compare them."""
        marks = self._marks[result.step]
        marks[0] = result.marks
        self._hear(timeout_ms=0)
        while len(marks) < self._group.size and not self._short:
            self._hear(_POLL_MS)
        if self._short:
            raise _Shortage(*self._short.values())
        del self._marks[result.step]
        found = disagreement(dict(sorted(marks.items())))
        if found is not None:
            self._doubt(result.step, f"Step {result.step}: {found}")

    def _doubt(self, step: int, found: str) -> None:
        """The first time, all steps on their way are lost; the second time, the engine."""
        if self._doubtful_until is not None and step > self._doubtful_until:
            raise EngineDeadError("fabric", f"For the second time ranks do not have the same bits. {found}", _FABRIC)
        if self._doubtful_until is None:
            self._doubtful_until = self._last_step
            self.workers.send(SUSPECT)
            self.runner.suspect()
        raise StepLostError("fabric", found, _FABRIC)

    def find_break(self, slot: int, position: int) -> str:
        self._check_alive()
        try:
            self.workers.send([FIND_BREAK, b"%d" % slot, b"%d" % position])
            return self.runner.find_break(slot, position)
        except Exception as error:
            raise self._stop(error) from error

    def _hear(self, timeout_ms: int) -> None:
        """Wait for a report and take in all that have come. FabricError if a rank is gone."""
        while (report := self.workers.receive(timeout_ms)) is not None:
            timeout_ms = 0
            match report:
                case RankReady():
                    self._loaded.append(report.rank)
                case CacheRoom():
                    self._blocks[report.rank] = report.blocks
                case Short():
                    self._short[report.rank] = report
                case Done():
                    self._marks[report.step][report.rank] = report.marks
                case RankTrace():
                    self._traces.append(report)
                case Pong():
                    self._pongs[report.rank] = report.time, time.monotonic_ns()

    def _check_peers(self) -> None:
        """Called while rank 0 waits in a collective. In vain, if another rank gave up before it came to this one."""
        self._hear(timeout_ms=0)
        behind = [short for short in self._short.values() if short.calls < self._group.calls]
        if behind:
            raise _Shortage(*behind)

    def _all_are_short(self) -> bool:
        """Whether every rank gave the step up at the same point: then no collective waits for anyone, and all go on."""
        deadline = time.monotonic() + _SHORT_WITHIN_S
        while len(self._short) < self._group.size - 1 and time.monotonic() < deadline:
            try:
                self._hear(_POLL_MS)
            except FabricError:
                return False
        calls = [short.calls for short in self._short.values()]
        if calls != [self._group.calls] * (self._group.size - 1):
            return False
        self._short.clear()
        self.workers.send(GO_ON)
        return True

    def adapt(self, order: AdapterOrder) -> None:
        self._check_alive()
        try:
            self.workers.send(pack_adapter(order))
            self.runner.adapt(order)
        except Exception as error:
            raise self._stop(error) from error

    def tend(self) -> bool:
        if not self.runner.put_off:
            return False
        self._check_alive()
        try:
            self.workers.send(TEND)
            return self.runner.tend()
        except Exception as error:
            raise self._stop(error) from error

    def start_trace(self) -> int:
        self._check_alive()
        self.workers.send(TRACE)
        return self.runner.start_trace()

    def end_trace(self) -> list[RankTrace]:
        """Of all ranks. Those on this machine have one clock; the others' are read by pings."""
        self._check_alive()
        self._traces = self.runner.end_trace()
        try:
            self.workers.send(END_TRACE)
            while len(self._traces) < self._group.size:
                self._hear(_POLL_MS)
            if self.nodes:
                self._traces = self._on_nodes(self._traces)
        except Exception as error:
            raise self._stop(error) from error
        return sorted(self._traces, key=lambda trace: trace.rank)

    def _on_nodes(self, traces: list[RankTrace]) -> list[RankTrace]:
        """With the machine of each rank, and by how much its clock is ahead."""
        ahead = {0: (0, 0)} | self._clocks_ahead()
        return [
            msgspec.structs.replace(
                trace,
                node=self.nodes[trace.rank],
                ahead=ahead[trace.rank][0],
                uncertain=trace.uncertain + ahead[trace.rank][1],
            )
            for trace in traces
        ]

    def _clocks_ahead(self) -> dict[int, tuple[int, int]]:
        pings: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for _ in range(_PINGS):
            self._pongs.clear()
            sent = time.monotonic_ns()
            self.workers.send(PING)
            while len(self._pongs) < self._group.size - 1:
                self._hear(_POLL_MS)
            for rank, (there, heard) in self._pongs.items():
                pings[rank].append((sent, there, heard))
        return {rank: ahead_by_pings(each) for rank, each in pings.items()}

    def beats(self) -> list[Beat]:
        """EngineDeadError if a rank is gone: rank 0 may be waiting for it, or for work, and not know."""
        if self._dead is not None:
            return []
        try:
            self.workers.check()
        except FabricError as error:
            raise self._explain(error) from error
        return self.workers.beats()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _stop(self, error: BaseException) -> EngineDeadError:
        """Find the culprit, end every rank, and say what happened."""
        self._dead = self._explain(error)
        self.close()
        return self._dead

    def _explain(self, error: BaseException) -> EngineDeadError:
        if isinstance(error, EngineDeadError):
            return error
        if isinstance(error, StepMemoryError | _Shortage):
            return EngineDeadError("out_of_memory", f"{error.found} Not all ranks did at once.", error.fix)
        cause = self.workers.cause_of_death() if isinstance(error, FabricError) else None
        if cause is None:
            trace, at = "".join(traceback.format_exception(error)), self._positions(0)
            return EngineDeadError("rank_failed", f"Rank 0 raised {type(error).__name__}: {error}{at}\n{trace}", _AGAIN)
        name, failure, at = self._name(cause.rank), cause.failure, self._positions(cause.rank)
        if failure is None:
            return EngineDeadError(cause.code, f"{name} {cause.seen}{at}", cause.fix or _AGAIN)
        if failure.code and failure.found and failure.fix:
            return EngineDeadError(failure.code, f"{name}: {failure.found}", failure.fix)
        return EngineDeadError("rank_failed", f"{name} raised {failure.error}{at}\n{failure.traceback}", _AGAIN)

    def _positions(self, blamed: int) -> str:
        """Where the rank was that failed, and where the others wait for it, as far as that is known here."""
        seen = {rank: RankSeen(where) for rank, where in enumerate(read_pages(self.workers.pages or Path()))}
        if not seen or not any(each.where.busy for each in seen.values()):
            return ""
        return " ".join([f" It was at: {position(seen[blamed].where)}.", *who_waits(seen, [blamed])])

    def _name(self, rank: int) -> str:
        return f"Rank {rank} on {self.nodes[rank]}" if self.nodes else f"Rank {rank}"

    def close(self) -> None:
        self.workers.close()
        self._group.close()
        torch.set_num_threads(self._threads_before)


class _Shortage(Exception):
    """Ranks had no memory for a step, and others did."""

    def __init__(self, *short: Short) -> None:
        super().__init__(short)
        self.found = " ".join(each.found for each in short)
        self.fix = short[0].fix
