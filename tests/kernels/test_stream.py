"""The kernel for few rows can be built, and is taken; `test_gpu.py` holds what it computes against its definition."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.kernels.fp8 import Fp8Weight, Quantised


def test_the_installed_triton_builds_it_for_hopper() -> None:
    """Gluon changes its names from version to version."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.compiled_stream"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert built.returncode == 0, built.stderr


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way products go on a GPU that has the instructions; nothing is computed."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import gemm, stream

    ways: list[str] = []
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gemm, "counters", lambda device: None)
    for name in ("matrix_vector", "stream_product", "run_tiles"):
        monkeypatch.setattr(gemm, name, lambda *_, name=name: ways.append(name))
    monkeypatch.setattr(gemm.F, "linear", lambda *_: ways.append("library"))
    return ways


def test_products_of_few_rows_are_streamed(taken: list[str]) -> None:
    from phalanx.kernels.gpu import product

    def ask(rows: int, inputs: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        product(torch.empty(rows, inputs, dtype=dtype), torch.empty(8, inputs, dtype=dtype), None)

    for rows in (1, 2, 64, 65):
        ask(rows)
    ask(2, inputs=63)
    ask(2, dtype=torch.float32)
    ask(2, dtype=torch.float16)
    assert taken == ["matrix_vector", *["stream_product"] * 2, *["library"] * 3, "stream_product"]


def test_fp8_products_of_few_rows_are_streamed_where_a_tile_has_one_scale(taken: list[str]) -> None:
    from phalanx.kernels.gpu import fp8_product

    for rows, row_block in ((1, 128), (64, 64), (2, 32), (65, 128)):
        weight = Fp8Weight.empty(256, 128, row_block=row_block, device=torch.device("cpu"))
        x = Quantised(torch.empty(rows, 128, dtype=torch.float8_e4m3fn), torch.empty(rows, 1))
        fp8_product(x, weight, None, torch.bfloat16)
    assert taken == ["stream_product", "stream_product", "run_tiles", "run_tiles"]


def test_other_gpus_than_hopper_do_not_stream(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.kernels.gpu import product, stream

    monkeypatch.setattr(stream, "multiprocessors", lambda device: 0)
    product(torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16), None)
    assert taken == ["library"]
