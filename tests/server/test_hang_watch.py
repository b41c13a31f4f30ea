"""How soon a hang is named: by looks, before anybody's stack is known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phalanx.engine.whereabouts import ALL_REDUCE, IN_CALL, Where
from phalanx.server import engine_client, hang_watch
from phalanx.server.hang_watch import HangWatch

WAITS = Where(10, 5, 4, 6, ALL_REDUCE, 42, IN_CALL)
BEHIND = Where(11, 4, 4, 6, ALL_REDUCE, 36)
WITHIN_S = 10.0


def test_a_hang_has_its_name_in_time_and_its_stacks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The look that sees the last movement, and one more for when it came: all others find everybody still."""
    watch, known = HangWatch(tmp_path), list[object]()
    told = "it hangs here"
    monkeypatch.setattr(hang_watch, "stacks_of", lambda *rank: known.append((watch.hang, caplog.text)) or told)
    pages = {0: WAITS, 1: BEHIND, 2: WAITS, 3: WAITS}
    looks = 1
    while watch.hang is None:
        asyncio.run(watch.look(pages, set(), here=True))
        looks += 1
    assert looks * engine_client._LOOK_EVERY_S < WITHIN_S - 2
    ((named, logged),) = known
    assert (named.code, named.ranks) == ("order_lost", [1])  # type: ignore[attr-defined]
    assert "Rank 1 has not begun step 5" in logged  # type: ignore[operator]
    assert told in watch.hang.stack
    assert told in caplog.text
    asyncio.run(watch.look(pages, set(), here=True))
    assert (told in watch.hang.stack, len(known)) == (True, 1)
    asyncio.run(watch.look(pages | {1: WAITS}, set(), here=True))
    assert watch.hang is None
