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

    def ask(rows: int, outputs: int = 256, row_block: int = 128) -> None:
        weight = Fp8Weight.empty(outputs, 128, row_block=row_block, device=torch.device("cpu"))
        x = Quantised(torch.empty(rows, 128, dtype=torch.float8_e4m3fn), torch.empty(rows, 1))
        fp8_product(x, weight, None, torch.bfloat16)

    for rows in (1, 64, 128, 129):
        ask(rows)
    ask(64, row_block=64)
    ask(2, row_block=32)
    ask(64, outputs=132 * 64 + 128)
    ask(65, outputs=132 * 64 + 128)
    streamed, tiled = "stream_product", "run_tiles"
    assert taken == [streamed, streamed, streamed, tiled, streamed, tiled, streamed, tiled]


def test_other_gpus_than_hopper_do_not_stream(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.kernels.gpu import product, stream

    monkeypatch.setattr(stream, "multiprocessors", lambda device: 0)
    product(torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16), None)
    assert taken == ["library"]


def test_programs_share_a_multiprocessor_unless_long_ones_are_few() -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.stream import LONG_BYTES, is_alone

    asked = [(132, 1), (133, 1), (264, LONG_BYTES), (265, LONG_BYTES)]
    assert [is_alone(programs, 132, size) for programs, size in asked] == [True, False, True, False]
