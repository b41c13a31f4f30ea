"""No kernel is built anew for where in memory a step's rows happen to lie, or for how many they are: behind "ready" a
request would wait for it.
"""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsource
from pkgutil import iter_modules

import pytest

pytest.importorskip("triton", reason="no triton for this machine")

from triton.runtime.jit import JITFunction

from phalanx.kernels import gpu

LIE_ANYWHERE = {"slots", "positions", "write_to", "source", "target"}
"""Columns of numbers that are sent in one copy: where one begins is up to how long those before it are."""
ANY_NUMBER = {"rows", "pairs", "chunks", "x_rows"}
MODULES = [module.name for module in iter_modules(gpu.__path__, gpu.__name__ + ".")]


def launched(module: str) -> list[JITFunction[object]]:
    loaded = import_module(module)
    names = re.findall(r"^ +(\w+)\[", getsource(loaded), re.MULTILINE)
    return [found for name in {*names} if isinstance(found := getattr(loaded, name, None), JITFunction)]


def test_rows_may_lie_anywhere_and_be_any_number() -> None:
    kernels = [kernel for module in MODULES for kernel in launched(module)]
    assert len(kernels) > 40
    for kernel in kernels:
        free = {each.name for each in kernel.params if each.do_not_specialize_on_alignment}
        uncounted = {each.name for each in kernel.params if each.do_not_specialize or each.is_constexpr}
        names = {each.name for each in kernel.params}
        assert LIE_ANYWHERE & names <= free, kernel.__name__
        assert ANY_NUMBER & names <= uncounted, kernel.__name__
