"""Triton's interpreter on a CPU, for modules that are run with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton import language
from triton.language.extra import cuda
from triton.runtime import interpreter


def make_ready() -> None:
    """Leave out what only GPUs have, and half of the time: at every call of a function the interpreter puts all of its
    language in place anew, and it computes for every sum whether it overflows, which then nobody looks at. It cuts
    numbers off where GPUs round them to bf16 and e4m3.
    """
    cuda.gdc_wait = cuda.gdc_launch_dependents = language.debug_barrier = lambda: None
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._convert_float = _rounding(interpreter._convert_float)


@contextmanager
def backwards() -> Iterator[None]:
    """The programs of a kernel run from the last to the first: on a GPU any may come so late."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def from_the_end(*at: int) -> None:
        forwards(*(size - 1 - number for size, number in zip(builder.grid_dim, at, strict=True)))

    builder.set_grid_idx = from_the_end
    try:
        yield
    finally:
        builder.set_grid_idx = forwards


def _rounding(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rounded(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (language.float32, language.bfloat16):
            wide = torch.from_numpy(np.ascontiguousarray(values))
            return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (language.float32, language.float8e4nv):
            return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, mode)

    return rounded


class _Staying:
    def restore(self) -> None:
        return None


def _patching_once(patch: Callable[[Any], Any]) -> Callable[[Any], _Staying]:
    done: set[tuple[bool, ...]] = set()

    def patch_once(function: Any) -> _Staying:
        seen = {id(value) for value in function.__globals__.values()}
        languages = tuple(id(each) in seen for each in (language, language.core))
        if languages not in done:
            patch(function)
            done.add(languages)
        return _Staying()

    return patch_once
