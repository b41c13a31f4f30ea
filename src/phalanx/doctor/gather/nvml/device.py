"""Device: a GPU, or the whole driver, to ask. Each call may fail for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
LOST = 15
_UNTOLD = {NOT_SUPPORTED, 13, 25, 26}
"""Not supported, no such function, another version of the argument, deprecated: that card or driver never tells."""


@dataclass(frozen=True)
class Device:
    """Calls of `nvml` with `handle` first, where there is one. `failures` are the things not told, by reason."""

    nvml: Any
    handle: Any = None
    failures: dict[str, list[str]] = field(default_factory=dict)
    codes: set[int] = field(default_factory=set)

    def ask(self, what: str, call: str, *arguments: Any) -> Any:
        """What NVML answers. `None` where it never tells; where it failed, that is written down too."""
        function = getattr(self.nvml, call, None)
        if function is None:
            return None
        before = () if self.handle is None else (self.handle,)
        try:
            return function(*before, *arguments)
        except self.nvml.NVMLError as error:
            self.note(what, error)
            return None

    def note(self, what: str, error: Any) -> None:
        self.codes.add(error.value)
        if error.value not in _UNTOLD:
            told = self.failures.setdefault(str(error).rstrip("."), [])
            if what not in told:
                told.append(what)

    def sentences(self, title: str) -> list[str]:
        """What it failed to tell, one sentence a reason."""
        return [f"{title}: NVML does not tell {', '.join(whats)}: {why}." for why, whats in self.failures.items()]


def as_text(value: Any) -> str | None:
    """Older bindings answer bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) and value else None
