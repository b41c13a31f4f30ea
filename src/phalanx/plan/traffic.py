"""Reads a trace of real traffic: when requests came and how long they were."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.spec.workload import WorkloadError

Arrival = tuple[float, int, int]

_COLUMNS = {
    "arrival": ("arrival_s", "arrival", "timestamp_s", "timestamp", "time", "TIMESTAMP"),
    "input": ("input_tokens", "input_length", "isl", "ContextTokens", "prompt_tokens"),
    "output": ("output_tokens", "output_length", "osl", "GeneratedTokens", "completion_tokens"),
}
_SESSIONS = ("session", "session_id", "conversation_id", "chat_id")


def read_sessions(path: Path) -> tuple[tuple[Arrival, ...], tuple[int, ...]]:
    """A trace, and whose turn each request is, where it has a column for that; none where it has not."""
    rows = _read(path)
    arrivals = [_arrival(path, number, row) for number, row in enumerate(rows, start=1)]
    names = [next((str(row[key]) for key in _SESSIONS if row.get(key) not in (None, "")), "") for row in rows]
    first = min(arrivals)[0]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    told = sorted(
        ((time - first, prompt, output), numbers[name] if name else len(numbers) + place)
        for place, ((time, prompt, output), name) in enumerate(zip(arrivals, names, strict=True))
    )
    sessions = tuple(session for _, session in told) if any(names) else ()
    return tuple(arrival for arrival, _ in told), sessions


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Arrivals in seconds from the first one, input and output tokens, from CSV with a header or JSON lines.

    Times are seconds or dates; in JSON lines `timestamp` is in milliseconds, as published traces have it.
    """
    return read_sessions(path)[0]


def _read(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError("bad_trace", f"{path} cannot be read: {error}.", "Name a CSV or JSON-lines file.") from None
    rows: Iterable[Mapping[str, Any]] = csv.DictReader(text.splitlines())
    if text.lstrip().startswith("{"):
        rows = _json_rows(path, text)
    found = list(rows)
    if not found:
        raise WorkloadError("bad_trace", f"{path} holds no requests.", f"Give it the columns {_wanted()}.")
    return found


def _json_rows(path: Path, text: str) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError("bad_trace", f"Line {number} of {path} is not JSON: {error}.", "Correct it.") from None
        if "timestamp" in row:
            row = {**row, "arrival_s": row["timestamp"] / 1000}
        yield row


def _arrival(path: Path, number: int, row: Mapping[str, Any]) -> Arrival:
    found = {
        name: next((row[key] for key in keys if row.get(key) not in (None, "")), None)
        for name, keys in _COLUMNS.items()
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise WorkloadError(
            "bad_trace", f"Request {number} of {path} has no {', '.join(missing)}.", f"Give it the columns {_wanted()}."
        )
    try:
        arrival, prompt, output = _seconds(found["arrival"]), int(str(found["input"])), int(str(found["output"]))
    except ValueError as error:
        raise WorkloadError("bad_trace", f"Request {number} of {path}: {error}.", "Write numbers.") from None
    if prompt < 1 or output < 1:
        raise WorkloadError(
            "bad_trace", f"Request {number} of {path} has {prompt} input and {output} output tokens.", "Both are >= 1."
        )
    return arrival, prompt, output


def _seconds(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return datetime.fromisoformat(str(value)[:26]).timestamp()


def _wanted() -> str:
    return ", ".join(keys[0] for keys in _COLUMNS.values())
