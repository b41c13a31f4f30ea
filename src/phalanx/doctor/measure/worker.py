"""A measuring process: started as `python -m phalanx.doctor.measure.worker`, ends with whoever started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import msgspec
import torch

from phalanx.doctor.measure.collectives import all_reduces
from phalanx.doctor.measure.messages import Alive, Began, Failed, Finished, MeasureAssignment, MeasureReport
from phalanx.doctor.measure.rates import rate_cpu, rate_gpu
from phalanx.fabric.group import FabricError
from phalanx.runtime.pulse import every_beat


class _Reports:
    """Standard output, kept for reports alone: what libraries print there goes to standard error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, report: MeasureReport) -> None:
        with self._lock:
            self._file.write(msgspec.json.encode(report) + b"\n")
            self._file.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reports = _Reports()
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=MeasureAssignment)
    every_beat(lambda: reports.send(Alive()))
    work = threading.Thread(target=_work, args=(assignment, reports), daemon=True)
    work.start()
    sys.stdin.buffer.read()
    os._exit(0)  # whoever started this closed the other end, by intent or by dying; NCCL's own farewell can hang


def _work(assignment: MeasureAssignment, reports: _Reports) -> None:
    try:
        if assignment.threads is not None:
            torch.set_num_threads(assignment.threads)
        for report in _measure(assignment):
            reports.send(report)
        reports.send(Finished())
    except Exception as error:
        reports.send(Failed(f"{type(error).__name__}: {error}", isinstance(error, FabricError)))


def _measure(assignment: MeasureAssignment) -> Iterator[MeasureReport]:
    if assignment.task == "all-reduce":
        yield from all_reduces(assignment)
        return
    yield Began("copies and matrix products")
    yield rate_gpu(assignment.rank) if assignment.device == "cuda" else rate_cpu()


if __name__ == "__main__":
    main()
