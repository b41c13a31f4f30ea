"""Builds the products with weights of four bits for GPUs, which needs none. Run by `test_four_bit.py` on its own."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from phalanx.kernels.four_bit import STEP
from phalanx.kernels.gpu.four_bit import GROUPED_TILES, TILES, _grouped_product, _product
from phalanx.kernels.gpu.four_bit_stream import (
    FEW_TOGETHER,
    GROUPED_TOGETHER,
    TOGETHER,
    TileCut,
    cut_of,
    stream_four_bit,
)
from phalanx.kernels.gpu.gemm import HAS_GLUON

SCALES = {"awq": "*fp16", "mxfp4": "*u8", "nvfp4": "*fp8e4nv"}
GROUPS = {"awq": 128, "mxfp4": 32, "nvfp4": 16}


def build(
    kind: str, rows: int, grouped: bool, dtype: str = "bf16", capability: int = 90
) -> triton.compiler.CompiledKernel:
    kernel, tile = (_grouped_product, GROUPED_TILES[rows]) if grouped else (_product, TILES[rows])
    types = {"x": f"*{dtype}", "values": "*i16", "scales": SCALES[kind], "bias": f"*{dtype}", "out": f"*{dtype}"}
    types |= {"zeros": "*u8", "factors": "*fp32", "partial": "*fp32", "counter": "*i32", "order": "*i32"}
    types |= {"owner": "*i32", "pair_weights": "*fp32"}
    fixed = {
        "E2M1": kind != "awq",
        "ZEROS": kind == "awq",
        "GROUP": GROUPS[kind],
        "EACH": STEP // GROUPS[kind],
        "ASSEMBLED": True,
        "HAS_FACTORS": kind == "nvfp4",
        "HAS_BIAS": True,
        "WEIGHED": True,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "STEP": tile.inputs,
        "SPLIT": True,
    }
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in fixed.items() if name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
    aligned |= {(names.index(name),): [["tt.divisibility", 16]] for name in ("inputs", "outputs")}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": capability >= 90}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def build_stream(kind: str, rows: int, grouped: bool, tiles: int) -> tuple[TileCut, triton.compiler.CompiledKernel]:
    shape, each = cut_of(rows, 4096, 4096, tiles, 132, grouped), STEP // GROUPS[kind]
    by_rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    words = shape.outputs * each // 4
    types = dict.fromkeys(("partial", "pair_weights"), "*fp32") | dict.fromkeys(("bias", "out"), "*bf16")
    types |= dict.fromkeys(("counter", "order", "owner"), "*i32")
    types["values"] = f"tensordesc<i16[{shape.outputs}, {STEP // 4}],{by_rows!r}>"
    types["xs"] = "*bf16" if grouped else f"tensordesc<bf16[{rows}, {STEP}],{by_rows!r}>"
    types["scales"] = f"tensordesc<i32[1, {words * (2 if kind == 'awq' else 1)}],{plain!r}>"
    types["zeros"] = f"tensordesc<i32[1, {words}],{plain!r}>"
    fixed = {
        "factors": None,
        "E2M1": kind != "awq",
        "ZEROS": kind == "awq",
        "EACH": each,
        "SCALE": gl.float16 if kind == "awq" else gl.uint8,
        "STEPS_A_GROUP": 1,
        "HAS_FACTORS": False,
        "HAS_BIAS": True,
        "GROUPED": grouped,
        "WEIGHED": grouped,
        "ROWS": rows,
        "SPLITS": shape.splits,
        "STAGES": shape.stages,
        "WARPS": shape.warps,
    } | ({} if kind == "awq" else {"zeros": None})
    names = stream_four_bit.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
    aligned |= {(names.index(name),): [["tt.divisibility", 16]] for name in ("inputs", "outputs")}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(stream_four_bit, signature, constants, aligned)
    options = {"num_warps": shape.warps, "launch_pdl": True}
    return shape, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for kind in SCALES:
        for rows, grouped in ((16, False), (128, True)):
            kernel = build(kind, rows, grouped)
            assert "wgmma" in kernel.asm["ptx"]
            assert kernel.metadata.shared < 227 * 1024
    assert "fma.rn.f16x2" in build("awq", 32, True, "fp16").asm["ptx"]
    assert HAS_GLUON
    cases = (("mxfp4", 8, 2, FEW_TOGETHER), ("mxfp4", 8, 32, GROUPED_TOGETHER[8]), ("awq", 64, 0, TOGETHER[64]))
    for kind, rows, experts, together in cases:
        shape, kernel = build_stream(kind, rows, experts > 0, experts or 2)
        assert (shape.splits > 1) == (experts < 32), "few programs share their tiles with others"
        assert (kernel.metadata.shared + 1024) * together <= 228 * 1024, (kind, rows, shape)
        assert "shfl" not in kernel.asm["ptx"].split("wgmma.mma_async")[1], "weights go from thread to thread"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kernel = build(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
        print(kernel.asm["ttgir"])
    else:
        main()
