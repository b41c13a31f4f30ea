"""A rank other than 0: `python -m phalanx.runtime.worker`, started by the engine or by its seat on another machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from phalanx.engine.step_plan import Totals
from phalanx.engine.whereabouts import Whereabouts
from phalanx.errors import PhalanxError, StepMemoryError
from phalanx.fabric.group import FabricError, open_store
from phalanx.runtime.channel import Context, Gate, Lookout, Receiver, Sender
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
    Failure,
    Pong,
    RankAssignment,
    RankReady,
    Short,
    encode,
    unpack_adapter,
    unpack_plan,
    unpack_sizes,
)
from phalanx.runtime.pulse import ENGINE_LOST_AFTER_S, Pulse, every_beat
from phalanx.runtime.rank import blocks_that_fit, learn_pace, load_model, make_group, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.speculate import open_checkpoint
from phalanx.runtime.stacks import tell_stacks

_BEATS_KEPT = 16
_LOOKS_IN_THE_DARK = 10
_ASIDE = (TEND, TRACE, END_TRACE, PING)
_LOOK_EVERY_MS = 1
_GO_ON_WITHIN_MS = 20_000
"""How long a rank that had no memory waits to hear that the others had none either. The engine ends it before."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankAssignment)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        _serve(assignment)
    except BaseException as error:
        _report_failure(assignment, error)
        sys.stderr.flush()
        os._exit(1)


def _die_with_parent() -> None:
    """Who started this rank holds the other end of standard input: it closes when that process ends in any way."""
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(assignment: RankAssignment) -> None:
    config, spot, meeting, rank = assignment.config, assignment.spot, assignment.meeting, assignment.rank
    use_cores(spot.ranks_here)
    ends = _Ends(assignment)
    totals, where = Totals(), _page(assignment)
    pulse = Pulse(rank, totals, where)
    every_beat(lambda: ends.beats.send(encode(pulse.beat())))

    group = make_group(config, rank, spot)
    group.where = where
    checkpoint = open_checkpoint(config, Path(assignment.model_path))
    model = load_model(config, checkpoint, group, lambda done, total: None, spot)
    ends.reports.send(encode(RankReady(rank, ends.orders.address)))
    assert _next(ends.orders) == CONNECT
    group.connect(open_store(meeting.store, config.tp), meeting.host)
    learn_pace(config, model, meeting.host)
    ends.reports.send(encode(CacheRoom(rank, blocks_that_fit(config, model, spot))))
    runner = make_runner(config, model, unpack_sizes(_next(ends.orders)))

    step = 0
    while True:
        frames = ends.orders.receive(_LOOK_EVERY_MS if runner.in_flight else None)
        if frames in _ASIDE:
            _aside(frames, runner, ends.reports)
            continue
        if frames == SUSPECT:
            runner.suspect()
            continue
        if frames is not None and frames[0] == FIND_BREAK:
            runner.find_break(*map(int, frames[1:]))
            continue
        adapter = unpack_adapter(frames) if frames is not None else None
        if adapter is not None:
            runner.adapt(adapter)
            continue
        if frames is not None:
            step += 1
            pulse.begin(step)
            plan = unpack_plan(frames, expected_step=step)
            try:
                runner.launch(plan)
            except StepMemoryError as error:
                ends.reports.send(encode(Short(rank, group.calls, error.found, error.fix)))
                if ends.orders.receive(_GO_ON_WITHIN_MS) != GO_ON:
                    raise
                pulse.end(busy=runner.in_flight > 0)
                continue
            totals.launched(plan)
        elif not runner.has_finished_one:
            continue
        if frames is None or runner.in_flight == runner.depth:
            result = runner.collect()
            pulse.end(busy=runner.in_flight > 0)
            totals.collected(result)
            ends.reports.send(encode(Done(rank, result.step, result.marks)))


def _aside(order: list[bytes] | None, runner: TorchRunner, reports: Sender) -> None:
    """What is no step."""
    if order == TEND:
        runner.tend()
    elif order == TRACE:
        runner.start_trace()
    elif order == END_TRACE:
        reports.send(encode(*runner.end_trace()))
    else:
        reports.send(encode(Pong(runner.model.place.group.rank, time.monotonic_ns())))


def _page(assignment: RankAssignment) -> Whereabouts:
    """Beside the engine, in the file of all ranks; where also a signal has the stacks of this process written."""
    if not assignment.pages:
        return Whereabouts()
    pages = Path(assignment.pages)
    tell_stacks(pages.parent, assignment.rank)
    return Whereabouts.in_file(pages, assignment.rank)


class _Ends:
    """This rank's ends of the channels. Where the engine has a beacon, a thread watches it from here on."""

    def __init__(self, assignment: RankAssignment) -> None:
        meeting, token, keys, engine = assignment.meeting, assignment.token, assignment.keys, assignment.engine_key
        context: Context = zmq.Context()
        if engine is not None:
            Gate(context, [engine])
        self.orders = Receiver(context, meeting.orders, token, keys)
        self.reports = Sender(context, meeting.reports, token, keys=keys, peer=engine)
        self.beats = Sender(context, meeting.beats, token, _BEATS_KEPT, keys, engine)
        if meeting.beacon is not None and keys is not None and engine is not None:
            lookout = Lookout(context, meeting.beacon, token, keys, engine)
            threading.Thread(target=_end_in_the_dark, args=[lookout], daemon=True).start()


def _end_in_the_dark(lookout: Lookout) -> None:
    """The engine, its machine or the link to it is gone: free what this rank holds.

    It is dark in many looks in a row. A pause of this process, after which flashes are still unread, is one of them.
    """
    dark = 0
    while dark < _LOOKS_IN_THE_DARK:
        dark = 0 if lookout.sees(int(ENGINE_LOST_AFTER_S * 1e3 / _LOOKS_IN_THE_DARK)) else dark + 1
    print(
        f"no sign of life from the engine for {ENGINE_LOST_AFTER_S:.0f} s: this rank ends", file=sys.stderr, flush=True
    )
    os._exit(0)


def _next(orders: Receiver) -> list[bytes]:
    frames = orders.receive()
    assert frames is not None
    return frames


def _report_failure(assignment: RankAssignment, error: BaseException) -> None:
    known = error.to_dict() if isinstance(error, PhalanxError) else {}
    failure = Failure(
        assignment.rank,
        f"{type(error).__name__}: {error}",
        traceback.format_exc(),
        isinstance(error, FabricError),
        **known,
    )
    path = Path(assignment.failure)
    unfinished = path.with_suffix(".part")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(failure))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
