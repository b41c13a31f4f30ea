"""The limit of memory that a process's service has: what it leaves, and whether one that was killed died of it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_OWN, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def left(own: Path = _OWN, groups: Path = _GROUPS) -> int | None:
    """Bytes that this process's control group and those around it may still use (cgroup v2); None without a limit.

    Pages of files that nobody needs are not counted as used: the kernel gives them up.
    """
    try:
        folder = groups / _name(own)
    except (OSError, ValueError):
        return None
    found = [room for each in (folder, *folder.parents) if each.is_relative_to(groups) and (room := _room(each))]
    return min(found, default=None)


def _room(folder: Path) -> int | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        idle = re.findall(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        return max(1, int(limit) - int(used) + sum(map(int, idle)))
    except (OSError, ValueError):
        return None


def _name(own: Path) -> str:
    (name,) = re.findall(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
    return str(name)


def fix_of(status: int) -> str | None:
    """What to do about a process of this service that left no report, if its exit status tells."""
    if status != -signal.SIGKILL:
        return None
    return _over_its_limit(_OWN, _GROUPS) or "Signal 9 is often the system's out-of-memory killer: see dmesg."


def _over_its_limit(own: Path, groups: Path) -> str | None:
    """If the kernel says that processes of this control group were killed for its memory (cgroup v2)."""
    try:
        folder = groups / _name(own)
        killed = re.search(r"^oom_kill (\d+)$", (folder / "memory.events").read_text(), re.MULTILINE)
        limit = (folder / "memory.max").read_text().strip()
    except (OSError, ValueError):
        return None
    if killed is None or killed[1] == "0" or not limit.isdigit():
        return None
    return (
        f"Its service may use {int(limit) / 1e9:.1f} GB (memory.max), and the kernel has killed {killed[1]} of its "
        "processes for more: raise MemoryMax or the container's limit, or lower --max-model-len or --max-num-seqs."
    )
