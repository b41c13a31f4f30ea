"""Who shares a GPU, and who has it alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from threading import Thread

from tests.card import on_the_card


def is_shut(door: Path) -> bool:
    with door.open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return True
    return False


def begun(run: Callable[[], None]) -> Thread:
    thread = Thread(target=run)
    thread.start()
    return thread


def test_one_that_wants_all_waits_for_others_and_they_for_it(tmp_path: Path) -> None:
    came: list[str] = []

    def come(name: str, alone: bool) -> None:
        with on_the_card(alone, tmp_path):
            came.append(name)

    with on_the_card(False, tmp_path):
        begun(lambda: come("another", alone=False)).join()
        waiting = [begun(lambda: come("one that wants all", alone=True))]
        while not is_shut(tmp_path / f"phalanx-door-{os.getuid()}") and len(came) < 2:
            time.sleep(0.001)
        waiting.append(begun(lambda: come("a third", alone=False)))
        waiting[-1].join(0.05)
        assert came == ["another"]
    for thread in waiting:
        thread.join()
    assert came == ["another", "one that wants all", "a third"]
    with on_the_card(True, tmp_path):
        late = begun(lambda: come("late", alone=False))
        late.join(0.05)
        assert came[-1] == "a third"
    late.join()
    assert came[-1] == "late"
