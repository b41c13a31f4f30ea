"""Products with weights of four bits: by their definition, in Triton's interpreter, built for a GPU, and on one."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import CheckpointError
from phalanx.kernels.four_bit import ROWS_AT_ONCE, FourBitWeight, Numbers, pack, round_int4, unpack, widen
from phalanx.kernels.gemm import FourBitGemm, four_bit_product_torch
from phalanx.kernels.moe import ExpertWeights, fused_experts, fused_experts_torch
from phalanx.quant import at_work
from phalanx.quant.base import Pieces
from phalanx.spec.ffn import Activation
from phalanx.spec.layout import FOUR_BIT_HEAD
from phalanx.spec.schemes import DEFAULTS, Scheme, awq, packed_int4
from tests.kernels.apart import run_apart

SCHEMES = {
    "awq": awq(128),
    "awq 32": awq(32),
    "w4a16": packed_int4(64, True, "bf16"),
    "mxfp4": DEFAULTS["mxfp4"],
    "nvfp4": DEFAULTS["nvfp4"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "interpret"),
    [("interpreted_four_bit", True), ("interpreted_four_bit_persistent", True), ("compiled_four_bit", False)],
)
def test_the_kernels_compute_as_defined_and_can_be_built(module: str, interpret: bool) -> None:
    run_apart(module, interpret=interpret)


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_sixteen_bits_hold_every_eighth_of_32_columns(numbers: Numbers) -> None:
    codes = torch.arange(40, dtype=torch.uint8)[None] * 7 % 16
    packed = pack(codes, numbers)
    assert packed.shape == (1, 32)
    assert torch.equal(unpack(packed, 40, numbers), codes)
    alone = torch.zeros(1, 32, dtype=torch.uint8)
    alone[0, [3, 11, 19, 27]] = 15
    assert pack(alone, numbers).view(torch.int16)[0].tolist() == [0, 0, 0, -1, 0, 0, 0, 0]


def test_scales_beyond_what_kernels_have_room_for_are_refused() -> None:
    scheme = at_work(DEFAULTS["mxfp4"])
    target = scheme.empty((), [2], 64, torch.device("cpu"))
    scales = torch.tensor([[120, 0], [160, 100]], dtype=torch.uint8)
    pieces: Pieces = {"values": torch.full((2, 32), 0x22, dtype=torch.uint8), "scales": scales}
    scheme.fill(target, pieces, (slice(0, 2), slice(0, 64)), None)
    assert target.dequantised(torch.float32)[1, [0, 32]].tolist() == [2.0**33, 2.0**-27]
    scales[0, 1] = 161
    with pytest.raises(CheckpointError, match=r"2\^34"):
        scheme.fill(target, pieces, (slice(0, 2), slice(0, 64)), None)


def test_a_plain_matrix_is_rounded_piece_by_piece() -> None:
    """As it would be at once, with as many bytes as a layout counts."""
    matrix = torch.randn(ROWS_AT_ONCE + 77, 512, generator=torch.Generator().manual_seed(0)) ** 3
    found = FourBitWeight.of(matrix)
    assert torch.equal(found.dequantised(torch.float32), widen(round_int4(matrix, 128, True, torch.float16), "int4"))
    groups = matrix.unflatten(1, (-1, 128))
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    assert ((found.dequantised(torch.float32) - matrix).unflatten(1, (-1, 128)).abs() < 0.51 * steps[..., None]).all()
    assert found.nbytes == FOUR_BIT_HEAD.bytes(*matrix.shape)


def made(scheme: Scheme, *shape: int) -> FourBitWeight:
    *stack, rows, columns = shape
    weight = at_work(scheme).empty(tuple(stack), [rows], columns, torch.device("cuda"))
    assert isinstance(weight, FourBitWeight)
    for index in range(stack[0] if stack else 1):
        at_work(scheme).round(weight[index] if stack else weight, torch.randn(rows, columns, device="cuda") * 0.1)
    return weight


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert not found.isnan().any()
    assert (found.double() - wanted.double()).norm() < 1e-2 * wanted.double().norm()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 65, 128, 200, 256, 300])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_on_a_gpu(name: str, rows: int, dtype: torch.dtype) -> None:
    narrow = 2880 if "mx" in name else 2816
    for outputs, inputs in ((4096, 4096), (33, 256), (1000, narrow), (130, 14336), (10248, narrow), (28680, narrow)):
        weight, bias = made(SCHEMES[name], outputs, inputs), torch.randn(outputs, device="cuda").to(dtype)
        x = torch.randn(rows, inputs, device="cuda").to(dtype)
        wanted = four_bit_product_torch(x.double(), weight, None) + bias.double()
        for _ in range(2):
            close(FourBitGemm(weight, bias, dtype)(x), wanted)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(("tokens", "experts"), [*((tokens, 16) for tokens in (1, 2, 7, 33, 128, 700)), (100, 128)])
@pytest.mark.parametrize("name", ["awq 32", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_on_a_gpu(name: str, tokens: int, experts: int, weighs_input: bool) -> None:
    top, hidden, inner = 4, 288, 160
    gate_up, down = made(SCHEMES[name], experts, 2 * inner, hidden), made(SCHEMES[name], experts, hidden, inner)
    biases = torch.randn(experts, 2 * inner, device="cuda"), torch.randn(experts, hidden, device="cuda")
    x, activation = torch.randn(tokens, hidden, device="cuda"), Activation("clamped", 7.0)
    weights = torch.rand(tokens, top, device="cuda")
    chosen = torch.stack([torch.randperm(experts, device="cuda")[:top] for _ in range(tokens)])
    wide = ExpertWeights(gate_up, down, *biases).widened(torch.float32)
    wanted = fused_experts_torch(x, wide, weights, chosen, activation, weighs_input)
    held = ExpertWeights(gate_up, down, *(bias.bfloat16() for bias in biases))
    found = fused_experts(x.bfloat16(), held, weights, chosen, activation, weighs_input)
    assert (found.double() - wanted.double()).norm() < 2e-2 * wanted.double().norm()
