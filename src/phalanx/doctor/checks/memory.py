"""GPU memory: whether it is sound, and whether it is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phalanx.doctor.checks.products import GIB, is_geforce, whose
from phalanx.doctor.facts import Facts, GpuFacts
from phalanx.doctor.finding import Finding

_USED_MIB = 1024
_AVAILABLE_SHARE = 0.85
"""Of unified memory, what a freshly booted machine has to spare; serving takes no more than that."""


def ecc(facts: Facts) -> Finding | None:
    """Memory without ECC is a choice on a GeForce and a mistake on a server's card."""
    off = [gpu for gpu in facts.gpus if gpu.ecc is False and not is_geforce(gpu) and not gpu.unified]
    if off:
        return Finding(
            "warning",
            "ecc",
            "ECC is off",
            whose(off),
            "A flipped bit in weights or KV cache goes unnoticed and changes answers.",
            "nvidia-smi -e 1, then reboot.",
        )
    if facts.gpus and all(gpu.ecc for gpu in facts.gpus):
        return Finding("ok", "ecc", "ECC", "on")
    return None


def ecc_errors(facts: Facts) -> Finding | None:
    """Errors that ECC saw and could not mend."""
    broken = [gpu for gpu in facts.gpus if gpu.uncorrected_errors]
    if broken:
        counts = ", ".join(f"GPU {gpu.index}: {gpu.uncorrected_errors}" for gpu in broken)
        return Finding(
            "error",
            "ecc_errors",
            "Uncorrectable memory errors",
            counts,
            "What was in that memory is lost: programs on it were ended, or went on with wrong numbers.",
            "Drain the machine and reset the GPU (nvidia-smi --gpu-reset). If they come back, have the card replaced.",
        )
    if facts.gpus and all(gpu.uncorrected_errors == 0 for gpu in facts.gpus):
        return Finding("ok", "ecc_errors", "Uncorrectable memory errors", "none since the driver was loaded")
    return None


def remapped_rows(facts: Facts) -> Iterator[Finding]:
    """Rows of memory that were, or still have to be, replaced by spare ones."""
    failed = [gpu for gpu in facts.gpus if gpu.remapped and gpu.remapped.failed]
    pending = [gpu for gpu in facts.gpus if gpu not in failed and _waits(gpu)]
    if failed:
        yield Finding(
            "error",
            "remapped_rows",
            "Memory has no spare rows left",
            whose(failed),
            "A broken row could not be replaced: errors in it will come back.",
            "Take the card out of service and have it replaced.",
        )
    if pending:
        yield Finding(
            "warning",
            "remapped_rows",
            "A memory row waits to be replaced",
            whose(pending),
            "The broken row is in use until the GPU is reset.",
            "Drain the machine, then nvidia-smi --gpu-reset or reboot.",
        )
    if facts.gpus and all(gpu.remapped and not (gpu.remapped.failed or gpu.remapped.pending) for gpu in facts.gpus):
        rows = sum(gpu.remapped.correctable + gpu.remapped.uncorrectable for gpu in facts.gpus if gpu.remapped)
        yield Finding("ok", "remapped_rows", "Memory rows", f"{rows} replaced, none waiting")


def _waits(gpu: GpuFacts) -> bool:
    """Whether rows, or pages on older cards, wait for a reset to be replaced."""
    return bool((gpu.remapped and gpu.remapped.pending) or (gpu.retired and gpu.retired.pending))


def gpu_memory(facts: Facts) -> Finding | None:
    """Who holds memory before anything is started."""
    told = [gpu for gpu in facts.gpus if not gpu.unified and gpu.memory_used_mib is not None]
    used = [gpu for gpu in told if (gpu.memory_used_mib or 0) > _USED_MIB]
    if used:
        holders = Counter(process.name for gpu in used for process in gpu.processes)
        who = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in holders.items())
        amounts = ", ".join(f"GPU {gpu.index}: {(gpu.memory_used_mib or 0) / 1024:.1f} GiB" for gpu in used)
        return Finding(
            "note" if facts.serving else "warning",
            "gpu_memory",
            "GPU memory is in use",
            f"{amounts}; by {who or 'a process that is not shown, perhaps in another container'}",
            "" if facts.serving else "Weights and KV cache lack it, and two programs on a card slow each other.",
            "" if facts.serving else "End it, or plan with the memory that is left; nvidia-smi shows the processes.",
        )
    if facts.gpus and len(told) == len(facts.gpus):
        return Finding("ok", "gpu_memory", "GPU memory", "free")
    return None


def unified_memory(facts: Facts) -> Finding | None:
    """On a GB10 weights, caches and programs share one memory, and /proc/meminfo is what tells of it."""
    total, available = facts.system.memory_bytes, facts.system.available_bytes
    if not any(gpu.unified for gpu in facts.gpus) or not total or available is None or facts.serving:
        return None
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available ({available / total:.0%})"
    if available < _AVAILABLE_SHARE * total:
        return Finding(
            "warning",
            "unified_memory",
            "Unified memory is partly taken",
            found,
            "CUDA counts the page cache as used: engines refuse to start, or the machine runs out and freezes.",
            "sync; echo 3 > /proc/sys/vm/drop_caches (as root) gives the page cache back; then end what holds the "
            "rest. "
            "Use at most 0.85 of the memory.",
        )
    return Finding("ok", "unified_memory", "Unified memory", found)
