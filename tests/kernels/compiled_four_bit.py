"""Builds the products with weights of four bits for GPUs, which needs none. Run by `test_four_bit.py` on its own."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx.kernels.gpu.four_bit import GROUPED_TILES, TILES, _grouped_product, _product

SCALES = {"awq": "*fp16", "mxfp4": "*u8", "nvfp4": "*fp8e4nv"}
GROUPS = {"awq": 128, "mxfp4": 32, "nvfp4": 16}


def build(
    kind: str, rows: int, grouped: bool, dtype: str = "bf16", capability: int = 90
) -> triton.compiler.CompiledKernel:
    kernel, tile = (_grouped_product, GROUPED_TILES[rows]) if grouped else (_product, TILES[rows])
    types = {"x": f"*{dtype}", "values": "*u8", "scales": SCALES[kind], "bias": f"*{dtype}", "out": f"*{dtype}"}
    types |= {"zeros": "*u8", "factors": "*fp32", "partial": "*fp32", "counter": "*i32", "order": "*i32"}
    types |= {"owner": "*i32", "pair_weights": "*fp32"}
    fixed = {
        "E2M1": kind != "awq",
        "ZEROS": kind == "awq",
        "GROUP": GROUPS[kind],
        "ASSEMBLY": True,
        "HAS_FACTORS": kind == "nvfp4",
        "HAS_BIAS": True,
        "WEIGHED": True,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "STEP": 128 if kind == "mxfp4" and dtype == "bf16" else min(128, max(32, GROUPS[kind])),
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


def main() -> None:
    for kind in SCALES:
        for rows, grouped in ((16, False), (128, True)):
            kernel = build(kind, rows, grouped)
            assert "wgmma" in kernel.asm["ptx"]
            assert kernel.metadata.shared < 227 * 1024
    assert "fma.rn.f16x2" in build("mxfp4", 32, True, "fp16").asm["ptx"]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kernel = build(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
        print(kernel.asm["ttgir"])
    else:
        main()
