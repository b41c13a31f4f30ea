"""Gluon in Triton's interpreter, which does not know it, for modules that are run with TRITON_INTERPRET=1.

What is copied asynchronously is not there before somebody waits for it, and a wait that would never end is an error.
How numbers are dealt to threads, and what these would have to wait for, is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.experimental.gluon.language.nvidia.hopper
import triton.experimental.gluon.nvidia.hopper
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

ALIKE = (
    "arange", "load", "store", "where", "exp", "log", "rsqrt", "abs", "maximum", "minimum", "sum", "max", "cdiv",
    "zeros", "split", "join", "permute", "reshape", "program_id", "num_programs", "static_range", "associative_scan",
)  # fmt: skip
NUMBERS = {"float32": np.float32, "int32": np.int32, "int64": np.int64}
WARPS = 4


class Memory:
    """Shared memory, which holds anything at first."""

    def __init__(self, kind: tl.dtype, held: np.ndarray) -> None:
        self.kind, self.held = kind, held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    def index(self, at: Any) -> Memory:
        assert 0 <= int(at) < len(self.held)
        return Memory(self.kind, self.held[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        assert start + length <= self.shape[dim]
        return Memory(self.kind, self.held[(slice(None),) * dim + (slice(start, start + length),)])

    def reinterpret(self, kind: tl.dtype, shape: list[int], layout: object) -> Memory:
        assert kind == self.kind
        whole = self.held.view()
        whole.shape = tuple(shape)  # fails where numbers do not lie together
        return Memory(kind, whole)

    def load(self, layout: object) -> tl.tensor:
        return tl.tensor(TensorHandle(self.held.copy(), self.kind), tl.block_type(self.kind, list(self.shape)))

    def store(self, value: tl.tensor) -> None:
        assert value.handle.data.shape == self.shape
        self.held[...] = value.handle.data


class Tiles:
    """A matrix that is copied in tiles."""

    def __init__(self, matrix: Any, block_shape: list[int], layout: object) -> None:
        self.matrix, self.block_shape, self.layout, self.dtype = matrix, block_shape, layout, tl.float32

    from_tensor = classmethod(lambda cls, *args: cls(*args))


class Copies:
    """Those under way: by barrier, or by none. Their places hold no numbers until they are waited for."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._expected: dict[int, int] = {}
        self._phases: dict[int, int] = {}

    def begin(self, barrier: int, into: np.ndarray, values: np.ndarray) -> None:
        into[...] = np.nan
        self._open.setdefault(barrier, []).append((into, values))

    def init(self, barrier: Memory, count: int) -> None:
        assert count == 1
        at = barrier.held.ctypes.data
        self._phases[at], self._expected[at] = 0, 0

    def expect(self, barrier: Memory, size: int, pred: Any = True) -> None:
        if bool(pred):
            at = barrier.held.ctypes.data
            assert self._expected[at] == 0, "one phase is not over when the next begins"
            self._expected[at] = size

    def wait(self, barrier: Memory, phase: Any) -> None:
        at = barrier.held.ctypes.data
        if (arrived := self._open.pop(at, [])) and self._expected[at]:
            assert sum(values.nbytes for _, values in arrived) == self._expected[at]
            self._arrive(arrived)
            self._phases[at], self._expected[at] = self._phases[at] + 1, 0
        assert self._phases[at] > 0
        assert (self._phases[at] - 1) % 2 == int(phase), "this would wait for ever"

    def wait_for_all(self, outstanding: int) -> None:
        assert outstanding == 0
        self._arrive(self._open.pop(0, []))

    def _arrive(self, copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for into, values in copies:
            into[...] = values


def _copy_tile(copies: Copies) -> Callable[..., None]:
    def copy(tiles: Tiles, at: list[Any], barrier: Memory, into: Memory, pred: Any = True) -> None:
        if bool(pred):
            row, column = (int(number) for number in at)
            height, width = tiles.block_shape
            tile = tiles.matrix[row : row + height, column : column + width]
            copies.begin(barrier.held.ctypes.data, into.held, tile.numpy().copy())

    return copy


def _copy_each(copies: Copies) -> Callable[..., None]:
    def copy(into: Memory, pointers: tl.tensor) -> None:
        copies.begin(0, into.held, tl.load(pointers).handle.data.copy())

    return copy


def _allocate(kind: tl.dtype, shape: list[int], layout: object) -> Memory:
    held = np.empty(shape, NUMBERS[kind.name if kind.name in NUMBERS else {"fp32": "float32"}[kind.name]])
    held.fill(-(2**30) if held.dtype.kind == "i" else np.nan)
    return Memory(kind, held)


def _without_layout(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        given = args[:2] if name in ("arange", "zeros") else args
        return getattr(tl, name)(*given, **options)

    return call


def _language() -> ModuleType:
    language = ModuleType("triton.experimental.gluon.language")
    for name in ALIKE:
        setattr(language, name, _without_layout(name))
    for name in ("float32", "int32", "int64", "uint8"):
        setattr(language, name, getattr(tl, name))
    for name in (
        "BlockedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
        "NVMMASharedLayout",
        "DistributedLinearLayout",
    ):
        setattr(language, name, lambda *args, **options: None)
    language.constexpr = lambda value: value
    language.num_warps = lambda: WARPS
    language.barrier = lambda: None
    language.convert_layout = lambda value, layout, assert_trivial=False: value
    language.allocate_shared_memory = _allocate
    language.shared_memory_descriptor = Memory
    return language


class Function(InterpretedFunction):
    def rewrite(self) -> Callable[..., Any]:
        function = super().rewrite()
        names = function.__annotations__
        function.__annotations__ = {name: kind.replace("gl.", "tl.") for name, kind in names.items()}
        return function


def _jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
    return Function if function is None else Function(function)


def _modules() -> dict[str, ModuleType]:
    copies = Copies()
    gluon, ampere, hopper, host = (ModuleType(name) for name in ("gluon", "ampere", "hopper", "host"))
    gluon.jit, gluon.constexpr_function = _jit, lambda function: function
    gluon.language = _language()
    ampere.async_copy, hopper.mbarrier, hopper.tma = ModuleType("async_copy"), ModuleType("mbarrier"), ModuleType("tma")
    ampere.async_copy.async_copy_global_to_shared = _copy_each(copies)
    ampere.async_copy.commit_group, ampere.async_copy.wait_group = lambda: None, copies.wait_for_all
    hopper.mbarrier.init, hopper.mbarrier.expect, hopper.mbarrier.wait = copies.init, copies.expect, copies.wait
    hopper.mbarrier.MBarrierLayout = lambda: None
    hopper.tma.async_load = _copy_tile(copies)
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma = hopper.warpgroup_mma_wait = None
    host.TensorDescriptor = Tiles
    language = {"language": gluon.language, "language.nvidia": ModuleType("nvidia")}
    language |= {"language.nvidia.ampere": ampere, "language.nvidia.hopper": hopper}
    parts = language | {"nvidia": ModuleType("nvidia"), "nvidia.hopper": host}
    return {"triton.experimental.gluon": gluon} | {f"triton.experimental.gluon.{name}": parts[name] for name in parts}


def interpreted(name: str) -> ModuleType:
    """A module that imports Gluon, and those that it imports: none of them may have been imported before."""
    ours = _modules()
    theirs = {each: sys.modules.pop(each) for each in list(sys.modules) if each.startswith("triton.experimental.gluon")}
    real = triton.experimental.gluon
    sys.modules.update(ours)
    triton.experimental.gluon = ours["triton.experimental.gluon"]
    try:
        module = import_module(name)
    finally:
        for each in ours:
            del sys.modules[each]
        sys.modules.update(theirs)
        triton.experimental.gluon = real
    language = ours["triton.experimental.gluon.language"]
    for each in [each for each in sys.modules.values() if getattr(each, "gl", None) is language]:
        each.tl = tl  # the interpreter wants to see it
    return module
