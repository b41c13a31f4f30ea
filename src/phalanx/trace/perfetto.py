"""A trace as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's JSON."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from phalanx.engine.marks import StepTraces
from phalanx.errors import ConfigError
from phalanx.trace.timeline import Call, RankStep, Step, steps_of

_ENGINE = 1_000_000
"""The engine's process number; those of ranks are their own."""

Event = dict[str, Any]


def to_chrome(traces: StepTraces) -> dict[str, Any]:
    """Events, with the records that they were made of beside them, which viewers pass over."""
    steps = steps_of(traces)
    zero = min((step.host.begun for step in steps), default=0)
    return {
        "traceEvents": [*_names(len(traces.ranks)), *_events(steps, zero)],
        "displayTimeUnit": "ms",
        "phalanx": msgspec.to_builtins(traces),
    }


def save(path: Path, traces: StepTraces) -> int:
    """Write a trace, compressed if the name ends with .gz. Its size in bytes."""
    data = msgspec.json.encode(to_chrome(traces))
    path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    return path.stat().st_size


def read(path: Path) -> StepTraces:
    """The records of a trace that was saved."""
    data = path.read_bytes()
    try:
        return records_of(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise ConfigError("bad_trace", f"{path} is no trace of Phalanx: {error}.", "Give one that it saved.") from error


class _File(msgspec.Struct):
    phalanx: StepTraces


def records_of(data: bytes) -> StepTraces:
    return msgspec.json.decode(data, type=_File).phalanx


def _names(ranks: int) -> Iterator[Event]:
    for pid, name in [(_ENGINE, "engine"), *((rank, f"rank {rank}") for rank in range(ranks))]:
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        order = -1 if pid == _ENGINE else pid
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}


def _events(steps: list[Step], zero: int) -> Iterator[Event]:
    flow = 0
    for step in steps:
        yield from _engine(step, zero)
        for rank in step.ranks:
            yield from _rank(step, rank, zero)
        for call in step.calls:
            yield from _call(call, zero)
            for number in range(len(call.came)):
                if number != call.last and call.waited(number) > 0:
                    flow += 1
                    yield from _arrow(call, number, flow, zero)


def _slice(pid: int, tid: int, name: str, begun: int, ended: int, zero: int, **more: Any) -> Event:
    event: Event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(begun, zero)}
    event["dur"] = _us(max(begun, ended), begun)
    if more:
        event["args"] = more
    return event


def _us(time: int, zero: int) -> float:
    return (time - zero) / 1000


def _engine(step: Step, zero: int) -> Iterator[Event]:
    """The engine's own time: what it chose, when it read and booked it; and counters."""
    host = step.host
    yield _slice(_ENGINE, 1, "schedule", host.begun, host.scheduled, zero, step=host.step)
    yield _slice(_ENGINE, 1, "book tokens", host.collected, host.applied, zero, step=host.step)
    counters = {
        "requests": {"running": host.running, "waiting": host.waiting},
        "free KV blocks": {"blocks": host.free_blocks},
        "tokens of a step": {"decodes": host.decodes, "prompts": host.prompt_tokens},
        "preemptions": {"so far": host.preemptions},
    }
    for name, values in counters.items():
        yield {"ph": "C", "pid": _ENGINE, "tid": 0, "name": name, "ts": _us(host.applied, zero), "args": values}


def _rank(step: Step, rank: RankStep, zero: int) -> Iterator[Event]:
    """Steps, in them layers, in them their parts."""
    host = step.host
    rows = {"decodes": host.decodes, "prompts": host.prompt_tokens}
    yield _slice(rank.rank, 1, f"step {host.step}", rank.begun, rank.ended, zero, **rows)
    layers: dict[int, tuple[int, int]] = {}
    for part in rank.slices:
        if part.layer is not None:
            begun, _ = layers.get(part.layer, (part.begun, 0))
            layers[part.layer] = begun, part.ended
    for layer, (begun, ended) in layers.items():
        yield _slice(rank.rank, 1, f"layer {layer}", begun, ended, zero)
    for part in rank.slices:
        yield _slice(rank.rank, 1, part.name, part.begun, part.ended, zero)


def _call(call: Call, zero: int) -> Iterator[Event]:
    """On every rank: the collective, in it the wait for the last to come, and the exchange."""
    for rank, (came, left) in enumerate(zip(call.came, call.left, strict=True)):
        yield _slice(rank, 1, call.kind, came, left, zero, bytes=call.size, last=call.last)
        waited = call.waited(rank)
        if waited > 0:
            yield _slice(rank, 1, f"waits for rank {call.last}", came, came + waited, zero)
        yield _slice(rank, 1, "exchange", came + waited, left, zero, bytes=call.size)


def _arrow(call: Call, rank: int, number: int, zero: int) -> Iterator[Event]:
    """From who came last to who waited."""
    ts, common = _us(call.all_there, zero), {"cat": "wait", "name": "waited for", "id": number}
    yield {"ph": "s", "pid": call.last, "tid": 1, "ts": ts, **common}
    yield {"ph": "f", "bp": "e", "pid": rank, "tid": 1, "ts": ts, **common}
