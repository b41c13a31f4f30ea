"""What others on this machine can see of a command."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/self/stat behind the name: where the arguments lie in this process's memory."""


def hide_from_process_list(secrets: Sequence[str]) -> None:
    """Write over these where `ps` would read them. Until this is called they could be seen."""
    if not any(secrets):
        return
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        shown = ctypes.string_at(start, end - start)
        for secret in filter(None, (secret.encode() for secret in secrets)):
            shown = shown.replace(secret, b"*" * len(secret))
        ctypes.memmove(start, shown, len(shown))
