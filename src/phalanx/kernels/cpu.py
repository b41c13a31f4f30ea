"""The C kernels, compiled once for this machine. Where there is no compiler, torch does the work instead."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "panels.c", "layer.c")]
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-schedule-insns",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_POINTER, _INDEX, _FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": [_POINTER] * 4 + [_INDEX] * 2 + [_FLOAT],
    "silu_and_mul": [_POINTER] * 2 + [_INDEX] * 2,
    "sigmoid": [_POINTER] * 2 + [_INDEX],
    "rotate_and_store": [_POINTER] * 5 + [_INDEX] * 5,
    "decode_attention": [_POINTER] * 6 + [_INDEX] * 9 + [_POINTER, _FLOAT],
    "skinny_gemm": [_POINTER] * 4 + [_INDEX] * 6,
    "likeliest": [_POINTER] * 2 + [_INDEX] * 2,
    "row_product": [_POINTER] * 4 + [_INDEX] * 3,
    "row_digest": [_POINTER] * 2 + [_INDEX] * 2,
    "panel_product": [_POINTER] * 4 + [_INDEX],
    "e4m3_product": [_POINTER] * 4 + [_INDEX],
    "widen_e4m3": [_POINTER] * 2 + [_INDEX] * 2,
    "whole_layer": [_POINTER] * 10 + [_INDEX] * 3,
    "meet": [_POINTER] + [_INDEX] * 4,
    "own_cores": [_POINTER, _INDEX],
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, from the cache folder or made now (some seconds); None where that cannot be."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError):
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int if name == "meet" else None
    return loaded


def _compiled(compiler: str) -> Path:
    """Linked with torch's own OpenMP, so that both use one pool of threads."""
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*")))
    sources = [source.read_bytes() for source in _SOURCES]
    key = repr((sources, _FLAGS, openmp, compiler, platform.platform(), _cpu_model()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    target = folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "compiling").open("w") as turn:
            with contextlib.suppress(OSError):  # folders of other machines may have no locks
                fcntl.flock(turn, fcntl.LOCK_EX)  # the other ranks of a first start wait, and find them compiled
            if not target.exists():
                _compile(compiler, target, openmp[:1])
    return target


def _compile(compiler: str, target: Path, libraries: list[str]) -> None:
    """All sources side by side."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        parts = [f"{folder}/{source.stem}.o" for source in _SOURCES]
        making = [
            subprocess.Popen([compiler, *_FLAGS, "-c", str(source), "-o", part], stderr=subprocess.DEVNULL)
            for source, part in zip(_SOURCES, parts, strict=True)
        ]
        statuses = {each.wait() for each in making}
        if statuses != {0}:
            raise OSError(f"{compiler} does not compile the kernels")
        fresh = Path(folder) / target.name
        together = [compiler, *_FLAGS, *parts, "-o", str(fresh), *libraries, "-lm"]
        subprocess.run(together, check=True, capture_output=True)
        fresh.rename(target)


def _cpu_model() -> str:
    """Which processor this is: a home folder may be shared by machines of several kinds."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return str(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def runs(tensor: Tensor) -> bool:
    """Whether the C kernels take tensors like this one."""
    return tensor.is_cpu and tensor.dtype is torch.float32 and library() is not None


def meet(flags: Tensor, rank: int, ranks: int, round: int, looks: int) -> bool:
    """Tell the other ranks, by memory they share, that this one has come to a round. Whether all have by then."""
    kernels = library()
    assert kernels is not None
    return bool(kernels.meet(flags.data_ptr(), rank, ranks, round, looks))


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call a kernel; tensors go as addresses, so they must be laid out as the kernel expects."""
    getattr(library(), name)(*[value.data_ptr() if type(value) is Tensor else value for value in arguments])
