"""Modules of this folder, each run in a process of its own: Triton is told when it is imported whether to interpret."""

from __future__ import annotations

import os
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests.forked import ForkedPython

PATIENCE_S = 300


class Apart:
    """`python -m tests.kernels.module`, forked from a process that has torch imported, but not Triton."""

    def __init__(self, module: str, *arguments: str, interpret: bool = True, **variables: str) -> None:
        pytest.importorskip("triton")
        self._errors = TemporaryFile()  # noqa: SIM115
        given = os.environ | {"TRITON_INTERPRET": str(int(interpret))} | variables
        name, errors = f"tests.kernels.{module}", self._errors.fileno()
        self._process = ForkedPython(name, *arguments, variables=given, stderr=errors)

    def join(self) -> None:
        """Wait for its end, which has to be a good one."""
        with self._errors:
            try:
                code = self._process.wait(PATIENCE_S)
            finally:
                self._process.kill()
            self._errors.seek(0)
            assert code == 0, self._errors.read().decode()


def run_apart(module: str, *arguments: str, **options: Any) -> None:
    Apart(module, *arguments, **options).join()
