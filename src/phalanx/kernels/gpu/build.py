"""Building kernels ahead of their first use, many at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode, JITFunction

aten = torch.ops.aten
_EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class _EmptyIsZero(TorchDispatchMode):
    """What a kernel would have filled is looked up by others: as numbers of tokens, chance must not have its way."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        made = operation(*args, **(options or {}))
        if operation.overloadpacket in _EMPTY:
            made.untyped_storage().fill_(0)
        return made


def _note(key: str) -> Path:
    """Where it is noted, beside the kernels themselves, that all kernels of a kind of engine were built."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    facts = (key, triton.__version__, torch.__version__, torch.cuda.get_device_name())
    digest = hashlib.sha256(repr(facts).encode() + sources).hexdigest()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(folder) / f"phalanx-{digest[:32]}"


def is_built(key: str) -> bool:
    """Whether an earlier start has built the kernels of such an engine: then each is read when it is first needed."""
    return _note(key).exists()


def note_built(key: str) -> None:
    with suppress(OSError):
        _note(key).touch()


@contextmanager
def built_not_run(threads: int) -> Iterator[None]:
    """Kernels launched inside are built, and none of them runs: all their results are zeros.

    At the end all are built. Those on disk from an earlier start are only read.
    """
    run = JITFunction.run

    def build(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), _EmptyIsZero():
        setattr(JITFunction, "run", build)  # noqa: B010
        try:
            yield
        finally:
            setattr(JITFunction, "run", run)  # noqa: B010
