"""HangWatch: looks at the ranks' pages now and then, and names who holds up a step in which nothing moves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from phalanx.engine.hang import Hang, RankSeen, name_hang
from phalanx.engine.whereabouts import PAGES, Where, read_pages
from phalanx.runtime.stacks import last_stacks_of, process_state, stacks_of

log = logging.getLogger("phalanx.server")

StacksOf = Callable[[int, Path, int], str]

LOOKS = 4
"""So many in a row have to find every rank where it was. Looks and not seconds: this process may have been away."""


class HangWatch:
    """Of one engine. `folder` is where its ranks on this machine have their pages and leave their stacks."""

    def __init__(self, folder: Path) -> None:
        self.hang: Hang | None = None
        self._folder = folder
        self._pages: Path | None = None
        self._last: dict[int, Where] = {}
        self._looks = 0
        self._moved = time.monotonic()

    @property
    def still_s(self) -> float:
        """Since a rank was last seen to move."""
        return time.monotonic() - self._moved

    async def look(self, told: Mapping[int, Where], silent: set[int], here: bool) -> None:
        """`told` is what the ranks said of themselves last; their pages, where they are at hand, are newer.

        `here`: they are processes of this machine. A hang is named at once: stacks take a second a rank, or more.
        """
        pages = dict(enumerate(self._read())) or dict(told)
        if pages != self._last:
            self._last, self._looks, self._moved = pages, 0, time.monotonic()
        self._looks += 1
        if self._looks <= LOOKS:
            if self.hang is not None and self.hang.certain:
                log.warning("the ranks go on")
            self.hang = None
            return
        seen = {r: RankSeen(where, r in silent, process_state(where.pid) if here else "") for r, where in pages.items()}
        hang = name_hang(seen)
        if hang is not None and (self.hang is None or self.hang.ranks != hang.ranks or self.hang.code != hang.code):
            self.hang = hang
            if hang.certain:
                log.error("hang: %s %s", hang.found, hang.fix)
            stack = await asyncio.to_thread(self._stacks, hang, stacks_of) if here else ""
            hang = msgspec.structs.replace(hang, stack=stack)
            if hang.certain and stack:
                log.error("hang: %s", stack)
        elif hang is not None and self.hang is not None:
            hang = msgspec.structs.replace(hang, stack=self.hang.stack)
        self.hang = hang

    async def last_words(self, here: bool) -> str:
        """What the hang is, with the stacks of who is to blame, of processes that are about to be ended."""
        if self.hang is None:
            return ""
        stack = await asyncio.to_thread(self._stacks, self.hang, last_stacks_of) if here else ""
        return f"{self.hang.found}\n{stack or self.hang.stack}".strip()

    def _read(self) -> list[Where]:
        """An engine of one rank has none."""
        if self._pages is None:
            self._pages = next(self._folder.glob(f"*/{PAGES}"), None)
        return [] if self._pages is None else read_pages(self._pages)

    def _stacks(self, hang: Hang, of: StacksOf) -> str:
        told = ((rank, of(self._last[rank].pid, self._folder, rank)) for rank in hang.ranks if self._last[rank].pid)
        return "\n".join(f"Stacks of rank {rank}:\n{stacks}" for rank, stacks in told if stacks)
