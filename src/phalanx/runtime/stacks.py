"""The stacks of a process that no longer answers.

A thread of its own tells them, which has the interpreter meanwhile: nothing moves of what is read. Where somebody keeps
the interpreter nothing moves either, and a signal's handler, which asks nobody, writes them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

TELL = signal.SIGUSR1
_ANSWERED_WITHIN_S = 10.0
_WRITTEN_WITHIN_S = 10.0
_STUCK_WITHIN_S = 1.0
"""One that the kernel holds will not write; if it has begun to, it is only held for a moment."""
_LOOK_EVERY_S = 0.05
_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)", re.MULTILINE)
_MOST_BYTES = 16 * 1024
_SPY_LIMIT_S = 5.0


def tell_stacks(folder: Path, rank: int) -> None:
    """From now on this process tells its threads' stacks when asked to, whatever it is doing."""
    faulthandler.register(TELL, (folder / _name(rank)).open("w"), all_threads=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folder / _door(rank)))
    door.listen()
    threading.Thread(target=_answer, args=[door], name="stacks", daemon=True).start()


def _answer(door: socket.socket) -> None:
    while True:
        with door.accept()[0] as asker:
            faulthandler.dump_traceback(asker.fileno(), all_threads=True)


def _name(rank: int) -> str:
    return f"stacks-{rank}"


def _door(rank: int) -> str:
    return f"ask-{rank}"


def process_state(pid: int) -> str:
    """The system's letter for it, as R, S or T; empty if it is gone or there is no telling."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def stacks_of(pid: int, folder: Path, rank: int) -> str:
    """What a rank is doing, as it says itself. One that is stopped cannot: py-spy can, where it is installed."""
    if process_state(pid) in ("T", "t"):
        return _spied(pid)
    return (_asked(folder, rank) or _told(pid, folder, rank))[:_MOST_BYTES]


def last_stacks_of(pid: int, folder: Path, rank: int) -> str:
    """The same of a process that is about to be ended: if it is stopped, it goes on for as long as telling takes."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGCONT)
    return (_asked(folder, rank) or _told(pid, folder, rank))[:_MOST_BYTES]


def _asked(folder: Path, rank: int) -> str:
    """Without the thread that answers. Empty if nobody does: that thread needs the interpreter, as others do."""
    path = next(folder.rglob(_door(rank)), None)
    if path is None:
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_ANSWERED_WITHIN_S)
        line.connect(str(path))
        threads = line.makefile("rb").read().decode(errors="replace").strip().split("\n\n")
        return "\n\n".join(thread for thread in threads if not thread.startswith("Current thread"))
    return ""


def _told(pid: int, folder: Path, rank: int) -> str:
    """It may be kept from writing between any two words: all is written once it has begun to write again."""
    path = next(folder.rglob(_name(rank)), None)
    if path is None:
        return ""
    before, began = path.stat().st_size, time.monotonic()
    told, is_whole = "", False
    with contextlib.suppress(OSError):
        os.kill(pid, TELL)
        while not is_whole and time.monotonic() - began < _patience_s(pid, bool(told)):
            time.sleep(_LOOK_EVERY_S)
            told, is_whole = _first_telling(path.read_bytes()[before:].decode(errors="replace"))
            if told and not is_whole:
                os.kill(pid, TELL)
    return told.strip()


def _patience_s(pid: int, has_begun: bool) -> float:
    writes = ("R", "S", "D") if has_begun else ("R", "S")
    return _WRITTEN_WITHIN_S if process_state(pid) in writes else _STUCK_WITHIN_S


def _first_telling(text: str) -> tuple[str, bool]:
    """The stacks up to where a thread is told of again, and whether one is."""
    seen: set[str] = set()
    for thread in _THREAD.finditer(text):
        if thread[1] in seen:
            return text[: thread.start()], True
        seen.add(thread[1])
    return text, False


def _spied(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SPY_LIMIT_S).stdout.strip()
    return ""
