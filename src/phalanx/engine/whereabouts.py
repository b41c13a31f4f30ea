"""Where a rank is: a page that it writes as it goes, and that others can read when it no longer answers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

EMBEDDING, HEAD = -1, -2
"""Places of a step outside its layers, whose own are 2 * layer for the mixer and 2 * layer + 1 for the FFN."""

ALL_REDUCE, GATHER = 1, 2
IN_CALL, FOR_DEVICE = 1, 2
"""What a rank may wait for: the others in a collective, or its own GPU at the end of a step."""

_NAMES = {0: "collective", ALL_REDUCE: "all-reduce", GATHER: "gather of the logits"}

PAGES = "pages"
"""The file in an engine's folder in which its ranks have their pages."""

_PAGE_BYTES = 128
_PID, _BEGUN, _ENDED, _PLACE, _KIND, _CALLS, _WAITS, _REACHED = range(8)


class Where(msgspec.Struct, array_like=True, frozen=True):
    """A page as it was read. `begun` and `ended` count steps, `calls` the collectives begun, of which the last was of
    this kind; a GPU's are those that its host has launched. `reached` numbers the meeting that the GPU itself has come
    to, -1 where that is not known.
    """

    pid: int = 0
    begun: int = 0
    ended: int = 0
    place: int = EMBEDDING
    kind: int = 0
    calls: int = 0
    waits: int = 0
    reached: int = -1

    @property
    def place_name(self) -> str:
        if self.place < 0:
            return "the embedding" if self.place == EMBEDDING else "the head"
        return f"layer {self.place // 2} ({'FFN' if self.place % 2 else 'mixer'})"

    @property
    def call_name(self) -> str:
        return f"{_NAMES.get(self.kind, _NAMES[0])} {self.calls}"

    @property
    def busy(self) -> bool:
        return self.begun > self.ended


class Whereabouts:
    """One rank's page. A write is one number in memory: nothing else is done for it while all is well."""

    def __init__(self, page: memoryview | None = None) -> None:
        self._numbers = memoryview(bytearray(_PAGE_BYTES) if page is None else page).cast("q")
        self._numbers[_PID] = os.getpid()
        self._numbers[_REACHED] = -1
        self.look: Callable[[], None] | None = None
        """Writes down how far the device has come, where it can be asked. For a thread that sees a step take long."""

    @classmethod
    def in_file(cls, path: Path, rank: int) -> Whereabouts:
        """This rank's page of a file that `make_pages` has made."""
        return cls(memoryview(_mapped(path))[rank * _PAGE_BYTES : (rank + 1) * _PAGE_BYTES])

    def begin_step(self, number: int) -> None:
        self._numbers[_BEGUN] = number

    def end_step(self, number: int) -> None:
        self._numbers[_ENDED] = number

    def at(self, place: int) -> None:
        self._numbers[_PLACE] = place

    def call(self, kind: int, calls: int) -> None:
        """A collective begins, the `calls`-th of this rank."""
        self._numbers[_KIND], self._numbers[_CALLS] = kind, calls

    def wait(self, for_what: int) -> None:
        """Nothing, once it has come."""
        self._numbers[_WAITS] = for_what

    def reached(self, meeting: int) -> None:
        self._numbers[_REACHED] = meeting

    def read(self) -> Where:
        return Where(*self._numbers[:8])


def make_pages(path: Path, ranks: int) -> None:
    """A file with an empty page for every rank."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.truncate(ranks * _PAGE_BYTES)


def read_pages(path: Path) -> list[Where]:
    """Of all ranks, in order; none where there is no such file."""
    try:
        numbers = memoryview(path.read_bytes()).cast("q")
    except OSError:
        return []
    width = _PAGE_BYTES // 8
    return [Where(*numbers[start : start + 8]) for start in range(0, len(numbers), width)]


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
