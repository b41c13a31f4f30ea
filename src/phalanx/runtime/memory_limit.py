"""What a process that was killed may have died of: its service's limit of memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path


def fix_of(status: int) -> str | None:
    """What to do about a process of this service that left no report, if its exit status tells."""
    if status != -signal.SIGKILL:
        return None
    return _over_its_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")) or (
        "Signal 9 is often the system's out-of-memory killer: see dmesg."
    )


def _over_its_limit(own: Path, groups: Path) -> str | None:
    """If the kernel says that processes of this control group were killed for its memory (cgroup v2)."""
    try:
        (name,) = re.findall(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
        folder = groups / name
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
