"""LocalExecutor: rank 0 in this process, the other ranks beside it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
import traceback
import weakref
from collections import defaultdict
from pathlib import Path

import msgspec
import torch
import zmq

from phalanx.engine.plan import Beat, StepPlan, StepResult
from phalanx.errors import EngineDeadError, PhalanxError
from phalanx.fabric.group import FabricError, GlooGroup
from phalanx.runtime import child
from phalanx.runtime.channel import Receiver, Sender
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.messages import (
    Assignment,
    Done,
    Failure,
    Ready,
    beat_decoder,
    beats_address,
    encode,
    failure_file,
    orders_address,
    pack_plan,
    report_decoder,
    reports_address,
)
from phalanx.runtime.rank import Sizes, agree_on_sizes, blocks_that_fit, load_model, make_runner
from phalanx.runtime.runner import digest
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import Progress

Process = subprocess.Popen[bytes]

_POLL_MS = 100
_CAUSE_WAIT_S = 2.0
_EXIT_WAIT_S = 3.0


class Workers:
    """The other ranks' processes and the folder, private to this user, in which they meet the engine."""

    def __init__(self, config: EngineConfig, model_path: Path, threads: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
        self.processes: dict[int, Process] = {}
        self._context = zmq.Context()
        token = secrets.token_hex(16)
        self._reports = Receiver(self._context, reports_address(self.folder), token)
        self._beats = Receiver(self._context, beats_address(self.folder), token)
        self._orders: dict[int, Sender] = {}
        self._finalizer = weakref.finalize(self, _clean_up, self.processes, self.folder, self._context)
        for rank in range(1, config.tp):
            self._orders[rank] = Sender(self._context, orders_address(self.folder, rank), token)
            self._spawn(Assignment(config, str(model_path), rank, str(self.folder), threads, token))

    def _spawn(self, assignment: Assignment) -> None:
        process = subprocess.Popen(
            child.command("phalanx.runtime.worker"), stdin=subprocess.PIPE, env=child.environment()
        )
        self.processes[assignment.rank] = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(assignment) + b"\n")
        process.stdin.flush()

    def send(self, frames: list[bytes]) -> None:
        for orders in self._orders.values():
            orders.send(*frames)

    def receive(self, timeout_ms: int) -> Ready | Done | None:
        """The next report, or None. A rank that has died raises."""
        frames = self._reports.receive(timeout_ms)
        if frames is not None:
            return report_decoder.decode(frames[0])
        if any(process.poll() is not None for process in self.processes.values()):
            raise FabricError("a rank has died")
        return None

    def beats(self) -> list[Beat]:
        beats = []
        while (frames := self._beats.receive(0)) is not None:
            beats.append(beat_decoder.decode(frames[0]))
        return beats

    def cause_of_death(self) -> tuple[int, Failure | None, int | None] | None:
        """The rank that failed first of its own accord: its report if it left one, else its exit status."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while True:
            failures = {rank: self._failure(rank) for rank in self.processes}
            statuses = {rank: process.poll() for rank, process in self.processes.items()}
            for rank, failure in failures.items():
                if failure is not None and not failure.echo:
                    return rank, failure, statuses[rank]
                if failure is None and statuses[rank] is not None:
                    return rank, None, statuses[rank]
            if time.monotonic() > deadline:
                return next(((rank, failure, None) for rank, failure in failures.items() if failure), None)
            time.sleep(0.02)

    def _failure(self, rank: int) -> Failure | None:
        path = failure_file(self.folder, rank)
        return msgspec.json.decode(path.read_bytes(), type=Failure) if path.exists() else None

    def close(self) -> None:
        self._finalizer()


def _clean_up(processes: dict[int, Process], folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Closing a worker's standard input ends it; what does not end is killed."""
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for process in processes.values():
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    context.destroy(linger=0)
    shutil.rmtree(folder, ignore_errors=True)


class LocalExecutor:
    """A runner over all ranks of this machine: hands the plan to the others, runs rank 0's share itself.

    When any rank dies, raises or samples other tokens than rank 0, all of them are stopped and EngineDeadError says
    which rank it was and why; so does every later call.
    """

    def __init__(self, config: EngineConfig, model_path: Path, progress: Progress) -> None:
        self._threads_before = torch.get_num_threads()
        threads = max(1, (os.cpu_count() or 1) // config.tp)
        self._dead: EngineDeadError | None = None
        self._digests: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._group = GlooGroup(0, config.tp)
        self.workers = Workers(config, model_path, threads)
        torch.set_num_threads(threads)
        try:
            self.sizes = self._start(config, model_path, progress)
        except BaseException as error:
            failed = self._stop(error) if not isinstance(error, PhalanxError | KeyboardInterrupt) else error
            self.close()
            raise failed from error

    def _start(self, config: EngineConfig, model_path: Path, progress: Progress) -> Sizes:
        checkpoint = Checkpoint(model_path, config.load_format)
        model = load_model(config, checkpoint, self._group, progress)
        blocks = [blocks_that_fit(config, model)]
        while len(blocks) < config.tp:
            report = self.workers.receive(_POLL_MS)
            if isinstance(report, Ready):
                blocks.append(report.blocks)
        sizes = agree_on_sizes(config, checkpoint.spec, blocks)
        self.workers.send([encode(sizes)])
        self._group.connect(self.workers.folder)
        self.runner = make_runner(config, model, sizes)
        self.depth = self.runner.depth
        return sizes

    def launch(self, plan: StepPlan) -> None:
        self._check_alive()
        try:
            self.workers.send(pack_plan(plan))
            self.runner.launch(plan)
        except Exception as error:
            raise self._stop(error) from error

    def collect(self) -> StepResult:
        self._check_alive()
        try:
            result = self.runner.collect()
            self._compare(Done(0, result.step, digest(result.tokens)))
            while (report := self.workers.receive(0)) is not None:
                self._compare(report)
        except Exception as error:
            raise self._stop(error) from error
        return result

    def beats(self) -> list[Beat]:
        return [] if self._dead else self.workers.beats()

    def _compare(self, report: Ready | Done) -> None:
        """Once every rank has reported a step, hold their tokens against rank 0's."""
        assert isinstance(report, Done)
        digests = self._digests[report.step]
        digests[report.rank] = report.digest
        if len(digests) == self._group.size:
            for rank, found in self._digests.pop(report.step).items():
                if found != digests[0]:
                    raise _Disagreement(rank, report.step)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _stop(self, error: BaseException) -> EngineDeadError:
        """Find the culprit, end every rank, and say what happened."""
        self._dead = self._explain(error)
        self.close()
        return self._dead

    def _explain(self, error: BaseException) -> EngineDeadError:
        again = "Start the engine again; if it recurs, run the same request with tp=1 to tell the rank from the model."
        if isinstance(error, _Disagreement):
            return EngineDeadError(
                "rank_disagrees",
                f"Rank {error.rank} sampled other tokens than rank 0 in step {error.step}.",
                "Its memory, its link or its software differs from the others': check that machine first.",
            )
        cause = self.workers.cause_of_death() if isinstance(error, FabricError) else None
        if cause is None:
            trace = "".join(traceback.format_exception(error))
            return EngineDeadError("rank_failed", f"Rank 0 raised {type(error).__name__}: {error}\n{trace}", again)
        rank, failure, status = cause
        if failure is None:
            how = f"was killed by signal {-status}" if status and status < 0 else f"exited with status {status}"
            return EngineDeadError("rank_died", f"Rank {rank} {how} without a report.", again)
        if failure.code and failure.found and failure.fix:
            return EngineDeadError(failure.code, f"Rank {rank}: {failure.found}", failure.fix)
        return EngineDeadError("rank_failed", f"Rank {rank} raised {failure.error}\n{failure.traceback}", again)

    def close(self) -> None:
        self.workers.close()
        self._group.close()
        torch.set_num_threads(self._threads_before)


class _Disagreement(Exception):
    def __init__(self, rank: int, step: int) -> None:
        super().__init__(rank, step)
        self.rank = rank
        self.step = step
