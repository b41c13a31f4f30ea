"""What a process tells of itself is whole, however often it is kept from writing, and telling it harms nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.runtime import stacks

CHANGING = """
def threads():
    while True:
        made = {}
        exec("def deep(n): return deep(n - 1) if n else None", made)
        made["deep"](40)

for _ in range(3):
    threading.Thread(target=threads, daemon=True).start()
print(flush=True)
threads()
"""
KEEPING = "print(flush=True); ctypes.PyDLL(None).sleep(1000); threading.Event().wait()"
"""The interpreter, to itself; until a signal comes."""

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
    assert asked[:2] == [signal.SIGCONT, stacks.TELL]


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


@contextmanager
def process_that(does: str, folder: Path) -> Iterator[int]:
    """By its number, once it has printed a line."""
    script = f"""
import ctypes, pathlib, sys, threading
from phalanx.runtime.stacks import tell_stacks
tell_stacks(pathlib.Path(sys.argv[1]), 3)
{does}
"""
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
            assert process.poll() is None
        finally:
            process.kill()


def test_threads_whose_calls_come_and_go_are_read_while_they_stand_still(tmp_path: Path) -> None:
    """A handler that reads them while they run reads what is gone, sooner or later."""
    with process_that(CHANGING, tmp_path) as pid:
        for _ in range(40):
            told = stacks.stacks_of(pid, tmp_path, 3)
            assert told.count("most recent call first") == 4
            assert told.endswith(" in <module>")
            assert "_answer" not in told


def test_one_that_keeps_the_interpreter_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_ANSWERED_WITHIN_S", 0.2)
    with process_that(KEEPING, tmp_path) as pid:
        assert "<module>" in stacks.stacks_of(pid, tmp_path, 3)


def test_one_that_is_stopped_goes_on_to_tell(tmp_path: Path) -> None:
    with process_that("print(flush=True); threading.Event().wait()", tmp_path) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert "<module>" in stacks.last_stacks_of(pid, tmp_path, 3)
