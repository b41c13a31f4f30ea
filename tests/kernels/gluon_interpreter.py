"""Gluon in Triton's interpreter, which does not know it, for modules that are run with TRITON_INTERPRET=1.

What is copied asynchronously is not there before somebody waits for it, and a wait that would never end is an error.
Warps that were given work of their own take turns: one goes on until it has to wait for others.
How numbers are dealt to threads, and what these would have to wait for, is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from threading import Semaphore, Thread
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon.language.nvidia.hopper
import triton.experimental.gluon.nvidia.hopper
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

ALIKE = (
    "arange", "load", "store", "where", "exp", "exp2", "log", "rsqrt", "abs", "maximum", "minimum", "sum", "max",
    "cdiv", "zeros", "zeros_like", "full", "split", "join", "permute", "reshape", "program_id", "num_programs",
    "static_range", "associative_scan", "atomic_add",
)  # fmt: skip
NUMBERS = {
    "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "fp8e4nv": np.uint8,
}  # fmt: skip
KINDS = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int16: tl.int16,
    torch.int32: tl.int32, torch.float8_e4m3fn: tl.float8e4nv,
}  # fmt: skip
BEFORE_LAYOUT = {"arange": 2, "zeros": 2, "full": 3}
NO_NUMBERS = {"f2": np.nan, "f4": np.nan, "u2": 0x7FC0, "u1": 0x7F, "i2": -(2**15), "i4": -(2**15), "i8": -(2**15)}
"""What is in memory before anything is, by numpy's types. The interpreter has bf16 and e4m3 as bits: these are NaN."""
WARPS, LANES = 4, 32


class Memory:
    """Shared memory, which holds anything at first."""

    def __init__(self, kind: tl.dtype, held: np.ndarray) -> None:
        self.kind, self.held = kind, held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def dtype(self) -> tl.dtype:
        return self.kind

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.kind, self.held.transpose(order))

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
        self.matrix, self.block_shape, self.layout, self.dtype = matrix, block_shape, layout, KINDS[matrix.dtype]

    from_tensor = classmethod(lambda cls, *args: cls(*args))


class Turns:
    """Warps with work of their own, as threads of which one runs at a time."""

    def __init__(self) -> None:
        self._mine: Semaphore | None = None
        self._next = Semaphore(0)
        self._moved = False
        self.warps = WARPS

    def moved(self) -> None:
        """Something happened that others may have waited for."""
        self._moved = True

    def leave_to_others(self) -> None:
        assert self._mine is not None, "this would wait for ever"
        mine, warps = self._mine, self.warps
        self._next.release()
        mine.acquire()
        self._mine, self.warps = mine, warps

    def run(self, work: tuple[Any, ...], warps: tuple[int, ...], registers: tuple[int, ...]) -> None:
        assert len(work) - 1 == len(warps) == len(registers)
        turns, failed = [Semaphore(0) for _ in work], []

        def begin(number: int) -> None:
            turns[number].acquire()
            function, arguments = work[number]
            self._mine, self.warps = turns[number], (WARPS, *warps)[number]
            try:
                function(*arguments)
            except BaseException as error:
                failed.append(error)
            left.remove(number)
            self._moved = True
            self._next.release()

        left = list(range(len(work)))
        for number in left:
            Thread(target=begin, args=(number,), daemon=True).start()
        while left and not failed:
            self._moved = False
            for number in list(left):
                turns[number].release()
                self._next.acquire()
            assert self._moved or failed, "all wait for each other"
        self._mine, self.warps = None, WARPS
        if failed:
            raise failed[0]


class Barrier:
    """How often all have arrived, who is still expected, and how many bytes."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.expected, self.phases = count, count, 0, 0
        self.copied: list[tuple[np.ndarray, np.ndarray]] = []
        self.loaded: list[tuple[np.ndarray, np.ndarray]] = []

    def arrive(self, count: int) -> None:
        assert count <= self.missing, "one phase is not over when the next begins"
        self.missing -= count

    def look(self) -> None:
        """If all have arrived, their copies do too, and the next phase begins."""
        if self.missing == 0:
            assert sum(values.nbytes for _, values in self.copied) == self.expected
            for into, values in self.copied + self.loaded:
                into[...] = values
            self.missing, self.expected, self.phases = self.count, 0, self.phases + 1
            self.copied, self.loaded = [], []


class Copies:
    """Those under way: by barrier, or by none. Their places hold no numbers until they are waited for."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._barriers: dict[int, Barrier] = {}
        self._of_nobody: list[tuple[np.ndarray, np.ndarray]] = []
        self._groups: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def _at(self, barrier: Memory) -> Barrier:
        return self._barriers[barrier.held.ctypes.data]

    def begin(self, barrier: Memory | None, into: np.ndarray, values: np.ndarray) -> None:
        into[...] = NO_NUMBERS[into.dtype.str[1:]]
        (self._of_nobody if barrier is None else self._at(barrier).copied).append((into, values))

    def init(self, barrier: Memory, count: int) -> None:
        self._barriers[barrier.held.ctypes.data] = Barrier(count)

    def arrive(self, barrier: Memory, *, count: int = 1, pred: Any = True) -> None:
        if bool(pred):
            self._at(barrier).arrive(count)
            self._turns.moved()

    def expect(self, barrier: Memory, size: int, pred: Any = True) -> None:
        if bool(pred):
            self.arrive(barrier)
            self._at(barrier).expected = size

    def arrive_with_copies(self, barrier: Memory, increment_count: bool) -> None:
        """Those of every thread."""
        assert not increment_count
        self._at(barrier).loaded, self._of_nobody = self._of_nobody, []
        self.arrive(barrier, count=LANES * self._turns.warps)

    def wait(self, barrier: Memory, phase: Any) -> None:
        found = self._at(barrier)
        found.look()
        while found.phases % 2 == int(phase):
            self._turns.leave_to_others()
            found.look()

    def commit(self) -> None:
        self._groups.append(self._of_nobody)
        self._of_nobody = []

    def wait_for_groups(self, outstanding: int) -> None:
        """All but the last ones."""
        while len(self._groups) > outstanding:
            for into, values in self._groups.pop(0):
                into[...] = values


def _copy_tile(copies: Copies) -> Callable[..., None]:
    def copy(tiles: Tiles, at: list[Any], barrier: Memory, into: Memory, pred: Any = True) -> None:
        if bool(pred):
            row, column = (int(number) for number in at)
            height, width = tiles.block_shape
            tile = tiles.matrix[row : row + height, column : column + width]
            whole = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8}.get(tiles.dtype, tile.dtype)
            bits = tile.view(whole).numpy()
            beyond = [(0, size - there) for size, there in zip(tiles.block_shape, bits.shape, strict=True)]
            copies.begin(barrier, into.held, np.pad(bits, beyond))

    return copy


def _copy_each(copies: Copies) -> Callable[..., None]:
    def copy(into: Memory, pointers: tl.tensor, mask: tl.tensor | None = None) -> None:
        loaded = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
        copies.begin(None, into.held, loaded.handle.data.copy())

    return copy


def _allocate(kind: tl.dtype, shape: list[int], layout: object) -> Memory:
    held = np.empty(shape, NUMBERS[kind.name])
    held.fill(NO_NUMBERS[held.dtype.str[1:]])
    return Memory(kind, held)


def _wide(kind: tl.dtype, held: np.ndarray) -> np.ndarray:
    if kind in (tl.bfloat16, tl.float8e4nv):
        narrow = torch.bfloat16 if kind == tl.bfloat16 else torch.float8_e4m3fn
        return torch.from_numpy(held.copy()).view(narrow).float().numpy()
    return held.astype(np.float32)


def _multiply(left: Any, right: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> tl.tensor:
    left = left.load(None) if isinstance(left, Memory) else left
    sums = _wide(left.dtype, left.handle.data) @ _wide(right.dtype, right.held)
    found = acc.handle.data + sums if use_acc else sums
    return tl.tensor(TensorHandle(found, tl.float32), tl.block_type(tl.float32, list(found.shape)))


def _multiply_values(left: Any, right: Any, acc: Any) -> tl.tensor:
    return _multiply(left, Memory(right.dtype, right.handle.data), acc)


def _without_layout(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return getattr(tl, name)(*args[: BEFORE_LAYOUT.get(name)], **options)

    return call


def _language(turns: Turns) -> ModuleType:
    language = ModuleType("triton.experimental.gluon.language")
    for name in ALIKE:
        setattr(language, name, _without_layout(name))
    for name in ("float32", "float16", "bfloat16", "float8e4nv", "int32", "int64", "uint8"):
        setattr(language, name, getattr(tl, name))
    for name in (
        "BlockedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
        "NVMMASharedLayout",
        "DistributedLinearLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
    ):
        setattr(language, name, lambda *args, **options: None)
    language.constexpr = lambda value: value
    language.num_warps = lambda: turns.warps
    language.warp_specialize = turns.run
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
    turns = Turns()
    copies = Copies(turns)
    gluon, ampere, hopper, host = (ModuleType(name) for name in ("gluon", "ampere", "hopper", "host"))
    gluon.jit, gluon.constexpr_function = _jit, lambda function: function
    gluon.language = _language(turns)
    ampere.async_copy, hopper.mbarrier, hopper.tma = ModuleType("async_copy"), ModuleType("mbarrier"), ModuleType("tma")
    ampere.async_copy.async_copy_global_to_shared = _copy_each(copies)
    ampere.async_copy.commit_group, ampere.async_copy.wait_group = copies.commit, copies.wait_for_groups
    ampere.async_copy.mbarrier_arrive, hopper.mbarrier.arrive = copies.arrive_with_copies, copies.arrive
    hopper.mbarrier.init, hopper.mbarrier.expect, hopper.mbarrier.wait = copies.init, copies.expect, copies.wait
    hopper.mbarrier.MBarrierLayout = lambda: None
    hopper.tma.async_load = _copy_tile(copies)
    hopper.fence_async_shared = lambda: None
    ampere.mma_v2 = _multiply_values
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _multiply, lambda outstanding, found: found[0]
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
