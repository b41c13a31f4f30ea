"""A rank other than 0: started by the engine as `python -m phalanx.runtime.worker`, ends with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec
import torch
import zmq

from phalanx.engine.plan import Totals
from phalanx.errors import PhalanxError
from phalanx.fabric.group import FabricError, GlooGroup
from phalanx.runtime.channel import Receiver, Sender
from phalanx.runtime.messages import (
    Assignment,
    Done,
    Failure,
    Ready,
    beats_address,
    encode,
    failure_file,
    orders_address,
    reports_address,
    unpack_plan,
    unpack_sizes,
)
from phalanx.runtime.pulse import Pulse, every_beat
from phalanx.runtime.rank import blocks_that_fit, load_model, make_runner
from phalanx.runtime.runner import digest
from phalanx.weights.checkpoint import Checkpoint

_BEATS_KEPT = 16


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        _serve(assignment)
    except BaseException as error:
        _report_failure(assignment, error)
        sys.stderr.flush()
        os._exit(1)


def _die_with_parent() -> None:
    """The engine holds the other end of standard input; it closes when the engine ends, however it ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(assignment: Assignment) -> None:
    folder, rank, config = Path(assignment.folder), assignment.rank, assignment.config
    torch.set_num_threads(assignment.threads)
    context = zmq.Context()
    orders = Receiver(context, orders_address(folder, rank), assignment.token)
    reports = Sender(context, reports_address(folder), assignment.token)

    group = GlooGroup(rank, config.tp)
    checkpoint = Checkpoint(Path(assignment.model_path), config.load_format)
    model = load_model(config, checkpoint, group, progress=lambda done, total: None)
    reports.send(encode(Ready(rank, blocks_that_fit(config, model))))
    sizes = unpack_sizes(_next(orders))
    group.connect(folder)
    runner = make_runner(config, model, sizes)

    totals = Totals()
    pulse = Pulse(rank, totals)
    beats = Sender(context, beats_address(folder), assignment.token, limit=_BEATS_KEPT)
    every_beat(lambda: beats.send(encode(pulse.beat())))
    step = 0
    while True:
        step += 1
        plan = unpack_plan(_next(orders), expected_step=step)
        with pulse.step(step):
            runner.launch(plan)
            result = runner.collect()
        totals.launched(plan)
        totals.collected(result)
        reports.send(encode(Done(rank, step, digest(result.tokens))))


def _next(orders: Receiver) -> list[bytes]:
    frames = orders.receive()
    assert frames is not None
    return frames


def _report_failure(assignment: Assignment, error: BaseException) -> None:
    known = error.to_dict() if isinstance(error, PhalanxError) else {}
    failure = Failure(
        assignment.rank,
        f"{type(error).__name__}: {error}",
        traceback.format_exc(),
        isinstance(error, FabricError),
        **known,
    )
    path = failure_file(Path(assignment.folder), assignment.rank)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode(failure))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
