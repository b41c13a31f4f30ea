"""What a process tells of itself is whole, however often it is kept from writing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.runtime import stacks

FIRST = 'Thread 0x1 (most recent call first):\n  File "a", line 1 in f\n\n'
SECOND = 'Current thread 0x2 (most recent call first):\n  File "b", line 2 in g\n\n'


@pytest.mark.parametrize("cut", [1, 20, len(FIRST), len(FIRST + SECOND) - 3])
def test_stacks_that_are_written_word_by_word_are_waited_for(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops after each part until it is looked at twice, and writes no more than it is asked for."""
    file = tmp_path / "stacks-1"
    file.write_text("of another time")
    dump = FIRST + SECOND
    parts = ["", dump[:cut], "", dump[cut:], ""]
    asked: list[int] = []

    def ask(pid: int, signum: int) -> None:
        asked.append(signum)
        if not parts and signum == stacks.TELL:
            parts.extend(["", dump])

    def write(seconds: float) -> None:
        with file.open("a") as open_file:
            open_file.write(parts.pop(0) if parts else "")

    monkeypatch.setattr(os, "kill", ask)
    monkeypatch.setattr(time, "sleep", write)
    monkeypatch.setattr(stacks, "process_state", lambda pid: "R")
    assert stacks.last_stacks_of(7, tmp_path, 1) == dump.strip()
    assert asked[:2] == [stacks.TELL, signal.SIGCONT]


def test_one_that_the_kernel_holds_is_not_waited_for_long_unless_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    for state, told, patience in (("D", "", 1.0), ("S", "", 10.0), ("D", "Thread 0x1", 10.0), ("Z", "Thread 0x1", 1.0)):
        monkeypatch.setattr(stacks, "process_state", lambda pid, state=state: state)
        monkeypatch.setattr(os, "kill", lambda pid, signum, told=told: (tmp_path / "stacks-0").write_text(told))
        (tmp_path / "stacks-0").write_text("")
        now[0] = 0.0
        assert stacks.stacks_of(7, tmp_path, 0) == told
        assert now[0] == pytest.approx(patience, abs=0.1)
