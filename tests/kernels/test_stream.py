"""The kernel for few rows can be built, computes what is defined, and is taken; `test_gpu.py` asks that on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.kernels.fp8 import Fp8Weight, Quantised
from tests.kernels.apart import run_apart


def test_the_installed_triton_builds_it_for_hopper() -> None:
    """Gluon changes its names from version to version."""
    run_apart("compiled_stream", interpret=False)


def test_it_computes_what_is_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_stream")


def test_experts_of_few_tokens_are_multiplied_as_defined() -> None:
    run_apart("interpreted_expert_stream")


def test_experts_of_many_tokens_are_multiplied_as_defined() -> None:
    run_apart("interpreted_expert_prompts")


def test_tiles_of_experts_hold_twice_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper, where weights can be copied in bulk. From so many on both products are one way's."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import expert_stream, moe

    monkeypatch.setattr(expert_stream, "multiprocessors", lambda device: 132)
    held = Fp8Weight.empty(4, 256, 128, row_block=128, device=torch.device("cpu"))
    small = Fp8Weight.empty(4, 256, 128, row_block=64, device=torch.device("cpu"))
    odd = Fp8Weight.empty(4, 256, 128, row_block=32, device=torch.device("cpu"))
    plain = torch.empty(4, 256, 128, dtype=torch.bfloat16)

    def tile_of(weight: torch.Tensor | Fp8Weight, pairs: int, bias: torch.Tensor | None = None) -> tuple[int, str]:
        tile = moe._way((weight, bias), (weight, None), torch.bfloat16).tile(pairs, 4)
        return tile.rows, "streamed" if tile.streamed else "both" if tile == moe.PROMPT_TILE else "tiles"

    asked = (1, 16, 17, 64, 160, 161, 257)
    few = [(8, "streamed"), (8, "streamed"), (16, "streamed"), (32, "streamed"), (32, "streamed")]
    assert [tile_of(held, pairs) for pairs in asked] == [*few, (128, "both"), (128, "both")]
    by_one = [*few, (32, "streamed"), (128, "tiles")]
    assert [tile_of(small, pairs) for pairs in asked] == by_one, "a tile has scales for 128 outputs each"
    assert [tile_of(held, pairs, torch.empty(4, 256)) for pairs in asked] == by_one, "biases are not added there"
    assert tile_of(small, 193) == (64, "streamed")
    assert [tile_of(plain, pairs) for pairs in (1, 64, 65, 129)] == [
        (8, "streamed"), (32, "streamed"), (64, "tiles"), (128, "both"),
    ]  # fmt: skip
    assert tile_of(odd, 1) == (16, "tiles"), "a tile of outputs has several scales"
    assert tile_of(plain.float(), 1)[1] == "tiles"
    assert tile_of(torch.empty(4, 256, 24, dtype=torch.bfloat16), 1)[1] == "tiles"
    monkeypatch.setattr(moe, "converts_e4m3", lambda device: False)
    assert tile_of(held, 257) == (64, "tiles"), "a card without FP8 widens"


def test_programs_of_experts_leave_room_for_others() -> None:
    """Rows of a tile, steps, bytes of a row's step and groups: of few steps half are under way, of long inputs what the
    factors leave room for.
    """
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.expert_stream import stages_of

    asked = ((8, 8, 256, 16), (16, 8, 256, 16), (32, 28, 256, 64), (8, 2, 256, 4), (8, 16, 256, 0), (64, 128, 256, 256))
    assert [stages_of(*each) for each in asked] == [4, 3, 2, 1, 6, 1]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way products go on a GPU that has the instructions; nothing is computed."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import gemm, stream

    ways: list[str] = []
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gemm, "counters", lambda device: None)
    monkeypatch.setattr(gemm, "_library_has_tiles", lambda device: False)
    for name in ("matrix_vector", "stream_product", "run_tiles"):
        monkeypatch.setattr(gemm, name, lambda *_, name=name: ways.append(name))
    monkeypatch.setattr(gemm.F, "linear", lambda *_: ways.append("library"))
    return ways


def test_products_of_few_rows_are_streamed(taken: list[str]) -> None:
    from phalanx.kernels.gpu.gemm import product

    def ask(rows: int, inputs: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        product(torch.empty(rows, inputs, dtype=dtype), torch.empty(8, inputs, dtype=dtype), None)

    for rows in (1, 2, 64, 65, 256, 257):
        ask(rows)
    ask(2, inputs=63)
    ask(2, dtype=torch.float32)
    ask(2, dtype=torch.float16)
    assert taken == ["matrix_vector", *["stream_product"] * 4, *["library"] * 3, "stream_product"]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile_rows"),
    [
        (64, 28672, 8192, 64),  # few rows: whatever their number
        (65, 66 * 64, 4096, 64),
        (128, 66 * 64, 4096, 64),
        (128, 66 * 64, 4224, None),  # long programs
        (129, 66 * 64, 2048, 128),  # too many of 64 rows
        (129, 66 * 64, 2176, None),
        (129, 67 * 64, 1024, None),  # and of 128
        (256, 1024, 3072, 64),  # a long one, split
        (257, 1024, 1024, None),
    ],
)
def test_more_rows_are_streamed_by_programs_that_run_at_once(
    rows: int, outputs: int, inputs: int, tile_rows: int | None
) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.stream import best_cut

    found = best_cut(rows, outputs, inputs, in_fp8=False, at_once=132)
    assert (found.rows if found is not None else None) == tile_rows


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33, 64, 65, 128, 200, 256])
def test_tiles_cover_a_product_and_no_program_is_idle(rows: int, in_fp8: bool) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.stream import MOST_FACTORS, best_cut

    for outputs in (1, 64, 1000, 8192):
        for inputs in (8, 1000, 3072, 40000):
            way = best_cut(rows, outputs, inputs, in_fp8, at_once=132)
            if way is None:
                assert rows > 64
                continue
            assert (way.row_tiles - 1) * way.rows < rows <= way.row_tiles * way.rows
            assert (way.tiles - 1) * way.outputs < outputs <= way.tiles * way.outputs
            assert (way.splits - 1) * way.inputs < inputs <= way.splits * way.inputs
            assert not in_fp8 or way.rows * way.inputs <= 128 * MOST_FACTORS


def test_a_long_product_in_fp8_is_cut_into_programs_that_run_at_once() -> None:
    """Two of them a multiprocessor would take turns; scales of 64 outputs do not let it."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.stream import best_cut

    def programs(rows: int, outputs: int, inputs: int, row_block: int = 128) -> tuple[int, int]:
        way = best_cut(rows, outputs, inputs, in_fp8=True, at_once=132, row_block=row_block)
        assert way is not None
        return way.outputs, way.programs

    assert programs(128, 5120, 17408) == (128, 120)
    assert programs(128, 5120, 17408, row_block=64) == (64, 240)
    assert programs(128, 5120, 6144) == (64, 80)
    assert programs(64, 5120, 17408) == (64, 160)


def test_fp8_products_of_few_rows_are_streamed_where_a_tile_has_one_scale(taken: list[str]) -> None:
    from phalanx.kernels.gpu.gemm import fp8_product

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


def test_many_rows_of_a_router_in_float32_go_by_tensor_cores(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.kernels.gpu import gemm

    for name in ("wide_product", "product_in_parts"):
        monkeypatch.setattr(gemm, name, lambda *_, name=name: taken.append(name))
    for rows, dtype in ((128, torch.bfloat16), (511, torch.bfloat16), (512, torch.bfloat16), (512, torch.float16)):
        gemm.product(torch.empty(rows, 64, dtype=dtype), torch.empty(8, 64), None)
    assert taken == ["wide_product", "library", "product_in_parts", "library"]


def test_the_library_is_given_scales_of_whole_fours(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tiles of inputs, and outputs that end within one: else odd shares would take twice as long."""
    from phalanx.kernels.gpu import gemm

    given: list[tuple[torch.Size, torch.Size, float]] = []

    def library(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        x_scales, _, scales, _ = more
        given.append((x_scales.shape, scales.shape, float(scales.sum())))
        return torch.empty(x.shape[0], weight.shape[1])

    monkeypatch.setattr(gemm.F, "scaled_mm", library)
    monkeypatch.setattr(gemm, "_library_has_tiles", lambda device: True)

    def ask(rows: int, outputs: int, inputs: int, row_block: int = 128) -> None:
        weight = Fp8Weight.empty(outputs, inputs, row_block=row_block, device=torch.device("cpu"))
        weight.scales.fill_(1.0)
        scales = torch.empty(-(-inputs // 128), rows).t()
        x = Quantised(torch.empty(rows, inputs, dtype=torch.float8_e4m3fn), scales)
        gemm.fp8_product(x, weight, None, torch.bfloat16)

    ask(300, 2112, 512)
    ask(301, 256, 2304)
    assert given == [((300, 4), (4, 17), 68.0), ((304, 18), (20, 2), 36.0)]
    ask(300, 200, 512)
    ask(300, 256, 500)
    ask(300, 256, 512, row_block=64)
    assert taken == ["run_tiles"] * 3


def test_other_gpus_than_hopper_do_not_stream(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.kernels.gpu import stream
    from phalanx.kernels.gpu.gemm import product

    monkeypatch.setattr(stream, "multiprocessors", lambda device: 0)
    product(torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16), None)
    assert taken == ["library"]


def test_programs_share_a_multiprocessor_unless_long_ones_are_few() -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.stream import LONG_BYTES, is_alone

    asked = [(132, 1), (133, 1), (264, LONG_BYTES), (265, LONG_BYTES)]
    assert [is_alone(programs, 132, size) for programs, size in asked] == [True, False, True, False]
