"""The engine's books on adapters: which are loaded, who uses them, and how much room there is for more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phalanx.engine.request import Request
from phalanx.errors import AdapterError
from phalanx.models.adapter import AdapterOrder, read_adapter
from phalanx.spec import ModelSpec


class AdapterBook:
    """Adapters by name. Each loaded one has a number that is never given again: cached prefixes go by it.

    `room` is what a rank has for all of them, in bytes. One that is unloaded takes no more requests at once, and leaves
    the ranks when its last one has ended.
    """

    def __init__(self, spec: ModelSpec | None = None, room: int = 0) -> None:
        self.room = room
        self._spec = spec
        self._numbers: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._next = 0

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    @property
    def any_leaving(self) -> bool:
        return bool(self._leaving)

    def number(self, name: str) -> int:
        if name not in self._numbers:
            known = f"Loaded are {', '.join(self._numbers)}." if self._numbers else "None is loaded."
            raise AdapterError("unknown_adapter", f"There is no adapter {name!r}.", known)
        return self._numbers[name]

    def load(self, name: str, folder: Path) -> AdapterOrder:
        """Read an adapter and enter it. AdapterError if it cannot be had."""
        if name in self._numbers:
            raise AdapterError("adapter_exists", f"There is an adapter {name!r} already.", "Unload it first.")
        assert self._spec is not None
        adapter = read_adapter(folder, self._spec)
        size, taken = adapter.rank_bytes(self._spec), sum(self._sizes.values())
        if taken + size > self.room:
            raise AdapterError(
                "no_adapter_memory",
                f"The adapter takes up to {size} bytes of a rank; of {self.room} for adapters {taken} are taken.",
                f"Unload others, or start with --lora-memory {taken + size}.",
            )
        self._next += 1
        self._numbers[name], self._sizes[self._next] = self._next, size
        return AdapterOrder(self._next, adapter)

    def unload(self, name: str) -> None:
        self._leaving.add(self.number(name))
        del self._numbers[name]

    def left(self, requests: Iterable[Request]) -> list[AdapterOrder]:
        """Those that nobody uses any more, and that are to go."""
        gone = sorted(self._leaving - {request.adapter for request in requests})
        self._leaving.difference_update(gone)
        for number in gone:
            del self._sizes[number]
        return [AdapterOrder(number) for number in gone]
