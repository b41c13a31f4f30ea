"""Builds the products with weights of four bits for GPUs, which needs none. Run by `test_four_bit.py` on its own."""

from __future__ import annotations

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from phalanx.kernels.four_bit import STEP, FourBitWeight
from phalanx.kernels.gpu.four_bit import GROUPED_TILES, TILES, _grouped_product, _product
from phalanx.kernels.gpu.four_bit_persistent import (
    COPYING,
    FEW_ROWS,
    GATHERING,
    GROUPED_WAYS,
    HEIGHT,
    WAYS,
    Stay,
    experts_stay,
    stay_four_bit,
    stays,
)
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


def build_stream(
    kind: str, rows: int, grouped: bool, tiles: int, placed: bool = False
) -> tuple[TileCut, triton.compiler.CompiledKernel]:
    shape = cut_of(rows, 4096, 4096, tiles, 132, grouped)
    fixed = {"factors": None, "HAS_FACTORS": False, "SPLITS": shape.splits, "STAGES": shape.stages}
    fixed |= {"WARPS": shape.warps, "PLACED": placed}
    options = {"num_warps": shape.warps}
    return shape, build_gluon(stream_four_bit, kind, rows, grouped, shape.outputs, fixed, options)


def build_stay(kind: str, way: Stay, grouped: bool, placed: bool = False) -> triton.compiler.CompiledKernel:
    each, copying = STEP // GROUPS[kind], GATHERING[way.rows] if grouped else COPYING
    stages = way.stages(STEP // 2 + each * (3 if kind == "awq" else 1))
    fixed = {"PARTS": way.parts, "STAGES": stages, "LEAST": 4, "TAKEN": way.taken(copying), "COPYING": copying}
    fixed["PLACED"] = placed
    options = {"num_warps": 4, "maxnreg": way.registers}
    return build_gluon(stay_four_bit, kind, way.rows, grouped, HEIGHT, fixed, options)


def build_gluon(
    kernel: Any, kind: str, rows: int, grouped: bool, outputs: int, more: dict[str, Any], options: dict[str, int]
) -> triton.compiler.CompiledKernel:
    each = STEP // GROUPS[kind]
    by_rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    words = outputs * each // 4
    types = dict.fromkeys(("partial", "pair_weights"), "*fp32") | dict.fromkeys(("bias", "out"), "*bf16")
    types |= dict.fromkeys(("counter", "order", "owner"), "*i32")
    types["values"] = f"tensordesc<i16[{outputs}, {STEP // 4}],{by_rows!r}>"
    types["xs"] = "*bf16" if grouped else f"tensordesc<bf16[{rows}, {STEP}],{by_rows!r}>"
    types["scales"] = f"tensordesc<i32[1, {words * (2 if kind == 'awq' else 1)}],{plain!r}>"
    types["zeros"] = f"tensordesc<i32[1, {words}],{plain!r}>"
    fixed = {
        "E2M1": kind != "awq",
        "ZEROS": kind == "awq",
        "EACH": each,
        "SCALE": gl.float16 if kind == "awq" else gl.uint8,
        "STEPS_A_GROUP": 1,
        "HAS_BIAS": True,
        "GROUPED": grouped,
        "WEIGHED": grouped,
        "ROWS": rows,
    }
    fixed |= more | ({} if kind == "awq" else {"zeros": None})
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
    aligned |= {(names.index(name),): [["tt.divisibility", 16]] for name in ("inputs", "outputs")}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True})


def held(outputs: int, inputs: int) -> FourBitWeight:
    return FourBitWeight.empty(
        outputs, inputs, numbers="int4", group=128, scale_dtype=torch.float16, zeros=True, factors=False,
        device=torch.device("meta"),
    )  # fmt: skip


def code_of(kernel: triton.compiler.CompiledKernel) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def lets_next_start_first(kernel: triton.compiler.CompiledKernel) -> bool:
    """The next kernel may read whose experts pairs are as soon as it starts: not before that is known here."""
    ptx = kernel.asm["ptx"]
    return ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")


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
        assert lets_next_start_first(kernel) == (experts == 0)
        assert (shape.splits > 1) == (experts < 32), "few programs share their tiles with others"
        assert (kernel.metadata.shared + 1024) * together <= 228 * 1024, (kind, rows, shape)
        assert "shfl" not in kernel.asm["ptx"].split("wgmma.mma_async")[1], "weights go from thread to thread"
    _, kernel = build_stream("mxfp4", 8, True, 2, placed=True)
    ptx = kernel.asm["ptx"]
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait"), "weights wait for the kernel ahead"
    for outputs, inputs, least in ((57344, 8192, 17), (37888, 3584, 17), (10240, 2048, 33), (8192, 8192, 65)):
        found = [stays(held(outputs, inputs), rows) for rows in (least - 1, least)]
        assert found == [False, True], (outputs, inputs)
    assert not stays(held(8192, 4096), 128)
    codes = torch.empty(1, device="meta", dtype=torch.uint8)
    for numbers, stay in (("e2m1", [False, True, True, False]), ("int4", [False, False, True, False])):
        weight = FourBitWeight(numbers, 64, 32, codes, codes)
        assert [experts_stay(weight, *asked) for asked in ((8, 159), (8, 160), (32, 1), (16, 500))] == stay
    of_experts = [("mxfp4", GROUPED_WAYS[rows], True) for rows in (8, 32)]
    for kind, way, grouped in (*of_experts, ("awq", WAYS[32], False), ("awq", WAYS[64], False)):
        kernel = build_stay(kind, way, grouped)
        assert lets_next_start_first(kernel) != grouped
        assert (kernel.metadata.shared + 1024) * way.together <= 228 * 1024, (kind, way)
        assert "setmaxnreg" in kernel.asm["ptx"]
        code = code_of(kernel)
        assert not re.search(r"\b(STL|LDL)\b", code), "there are not enough registers"
        if way.rows <= FEW_ROWS:
            assert "HGMMA" not in code
        else:
            assert code.count("WARPGROUP.DEPBAR") < code.count("HGMMA") // 4, "each multiplication is waited for"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kernel = build(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
        print(kernel.asm["ttgir"])
    else:
        main()
