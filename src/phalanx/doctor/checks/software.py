"""Versions that must fit each other. Each rule has its source."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.doctor.checks.products import is_spark, whose
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding
from phalanx.version import install_command

Version = tuple[int, ...]

OLDEST_DRIVER = {13: 580, 12: 525, 11: 450}
"""By CUDA major version. NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1 (read 2026-11-15)."""

FIRST_CUDA: dict[Version, Version] = {
    (12, 1): (12, 9),
    (12, 0): (12, 8),
    (10, 3): (12, 9),
    (10, 0): (12, 8),
    (9, 0): (11, 8),
    (8, 9): (11, 8),
}
"""Compute capability and the first CUDA that builds for it, newest first. NVIDIA, Blackwell Compatibility Guide, CUDA
Features Archive 11.8, 12.8, 12.9 (read 2026-11-15)."""

FIRST_RAY_WITH_TOKENS = (2, 52)
"""Ray, "Token authentication" (read 2026-11-15); before it anyone who reaches the ports runs code: CVE-2023-48022."""


def version(text: str | None) -> Version:
    """The leading numbers of a version; empty where it has none."""
    matched = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in matched[0].split(".")) if matched else ()


def driver_for_torch(facts: Facts) -> Finding | None:
    """The driver must be as new as torch's CUDA wants it; within a major version any will do."""
    software = facts.software
    wanted, driver = version(software.torch_cuda), version(software.driver)
    if not facts.gpus or not wanted or not driver or wanted[0] not in OLDEST_DRIVER:
        return None
    oldest = OLDEST_DRIVER[wanted[0]]
    found = f"driver {software.driver}, torch {software.torch} for CUDA {software.torch_cuda}"
    if driver[0] < oldest:
        return Finding(
            "error",
            "driver_for_torch",
            "The driver is too old for torch",
            found,
            f"CUDA {wanted[0]} needs a driver of {oldest} or newer: torch sees no GPU.",
            f"Install driver {oldest} or newer (and the fabric manager of the same version), or a torch for an older "
            f"CUDA.",
        )
    offered = version(software.driver_cuda)
    if offered and offered[0] == wanted[0] and offered < wanted[: len(offered)]:
        return Finding(
            "note",
            "driver_for_torch",
            "The driver is older than torch's CUDA",
            f"{found}; the driver speaks CUDA {software.driver_cuda}",
            "It works within one major version, but code that is compiled at run time (PTX) may be refused.",
            "Update the driver when there is a chance to.",
        )
    return Finding("ok", "driver_for_torch", "Driver and torch", found)


def torch_for_gpu(facts: Facts) -> Finding | None:
    """A card that is newer than torch's CUDA has no kernels there."""
    cuda = version(facts.software.torch_cuda)
    if not cuda:
        return None
    too_new = [gpu for gpu in facts.gpus if (first := _first_cuda(version(gpu.capability))) and cuda < first]
    if not too_new:
        return None
    newest = ".".join(map(str, max(_first_cuda(version(gpu.capability)) for gpu in too_new)))
    return Finding(
        "error",
        "torch_for_gpu",
        "torch is too old for the card",
        f"{whose(too_new)}: compute capability {too_new[0].capability}; torch is built for CUDA "
        f"{facts.software.torch_cuda}",
        "There are no kernels for it: 'no kernel image is available for execution on the device'.",
        f"Install a torch for CUDA {newest} or newer.",
    )


def _first_cuda(capability: Version) -> Version:
    return next((cuda for oldest, cuda in FIRST_CUDA.items() if capability >= oldest), ())


def torch_gpus(facts: Facts) -> Finding | None:
    """Whether torch is there, built for CUDA, and sees what the driver sees."""
    software, gpus = facts.software, facts.gpus
    if not gpus:
        return None
    if software.torch is None:
        return Finding(
            "note",
            "torch_gpus",
            "torch is not installed",
            f"{len(gpus)} GPUs, no torch in this Python ({software.python})",
            "phalanx plan and doctor work without; phalanx serve does not.",
            install_command("serve"),
        )
    if software.torch_cuda is None and "+cpu" in software.torch:
        return Finding(
            "error",
            "torch_gpus",
            "torch is built without CUDA",
            f"torch {software.torch}",
            "It cannot use the GPUs: everything would run on the processor.",
            "Install torch from its CUDA index: https://pytorch.org/get-started/locally",
        )
    seen = software.torch_sees_gpus
    if seen is None or any(gpu.mig == "on" for gpu in gpus):
        return None
    found = f"torch {software.torch} sees {seen} of {len(gpus)} GPUs"
    if seen == 0:
        return Finding(
            "error",
            "torch_gpus",
            "torch sees no GPU",
            found,
            "The driver lists them, but CUDA does not start: a driver that is too old, a fabric manager that does not "
            "run "
            "(error 802), or CUDA_VISIBLE_DEVICES that is empty.",
            "python -c 'import torch; torch.cuda.init()' says which.",
        )
    if seen < len(gpus):
        return Finding(
            "note",
            "torch_gpus",
            "torch sees fewer GPUs",
            found,
            "CUDA_VISIBLE_DEVICES or the container hides the others.",
            "Unset it where all are wanted.",
        )
    return Finding("ok", "torch_gpus", "torch", found)


def nccl(facts: Facts) -> Finding | None:
    """Two NCCL libraries on one machine."""
    loaded, beside = facts.software.nccl, facts.software.system_nccl
    if not facts.gpus or not loaded or not beside:
        return None
    found = f"torch loads {loaded}, the system has {beside}"
    if is_spark(facts):
        return Finding(
            "warning",
            "nccl",
            "Two NCCL libraries on a DGX Spark",
            found,
            "The one of DGX OS and the one from pip differ even where both say 2.28.9: with the wrong one ranks wedge "
            "after "
            "minutes of load (vllm#42354, 2026).",
            "Let every machine load the system's: LD_PRELOAD=/usr/lib/aarch64-linux-gnu/libnccl.so.2, and check with "
            "NCCL_DEBUG=VERSION.",
        )
    if version(loaded) != version(beside):
        return Finding(
            "note",
            "nccl",
            "Two NCCL libraries",
            found,
            "A program that loads the other one cannot talk to ranks that use this one across machines.",
            "NCCL_DEBUG=VERSION shows which one a program loads; keep it the same on all machines.",
        )
    return Finding("ok", "nccl", "NCCL", found)


def ray(facts: Facts) -> Iterator[Finding]:
    """Ray lets whoever reaches its ports run code, unless it asks for a token."""
    installed = version(facts.software.ray)
    if installed and installed < FIRST_RAY_WITH_TOKENS:
        yield Finding(
            "warning",
            "ray",
            "This Ray cannot ask for a token",
            f"Ray {facts.software.ray}",
            "Anyone who reaches its ports can run code on every machine of the cluster (CVE-2023-48022).",
            "Install Ray 2.52 or newer and set RAY_AUTH_MODE=token.",
        )
