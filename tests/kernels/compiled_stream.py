"""Builds the kernels for few rows for Hopper, which needs no GPU. Run by `test_stream.py` in a process of its own."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from phalanx.kernels.gpu import expert_prompts, expert_stream
from phalanx.kernels.gpu.gemm import HAS_GLUON
from phalanx.kernels.gpu.stream import (
    FEW_ROWS,
    MOST_FACTORS,
    OUTPUTS,
    TILE_ROWS,
    WIDE_OUTPUTS,
    copied_at_once,
    stages_of,
    step_of,
    stream,
)
from tests.kernels.compiled_four_bit import code_of

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY, OF_THE_SYSTEM = 228 * 1024, 1024


def shared_memory(rows: int, splits: int, groups: int, alone: bool, outputs: int = OUTPUTS) -> int:
    """The bytes that a program takes."""
    kind, bits, step = *(("fp8e4nv", 8) if groups else ("bf16", 16)), step_of(groups > 0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    types = dict.fromkeys(("weight_scales", "x_scales", "partial"), "*fp32") | {"bias": "*bf16", "out": "*bf16"}
    types |= {"counter": "*i32"} | dict.fromkeys(("rows", "outputs", "inputs"), "i32")
    for name, height in (("weights", outputs), ("xs", copied_at_once(rows))):
        types[name] = f"tensordesc<{kind}[{height}, {step}],{layout!r}>"
    fixed = {"GROUPS": groups, "ROW_BLOCK": 128, "HAS_BIAS": True, "ROWS": rows, "SPLITS": splits}
    fixed["STAGES"] = stages_of((outputs + rows) * step * bits // 8, 4 * groups * rows, alone, groups > 0)
    names = stream.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    source = GluonASTSource(stream, signature, {(names.index(name),): value for name, value in fixed.items()})
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": outputs // 16, "launch_pdl": True})
    return int(kernel.metadata.shared) + OF_THE_SYSTEM


def shared_memory_of_experts(rows: int, inputs: int, in_fp8: bool, placed: bool) -> int:
    kind, bits, step = *(("fp8e4nv", 8) if in_fp8 else ("bf16", 16)), step_of(in_fp8)
    steps = triton.cdiv(inputs, step)
    groups = triton.next_power_of_2(2 * steps) if in_fp8 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    types = dict.fromkeys(("weight_scales", "x_scales", "pair_weights"), "*fp32") | {"x": f"*{kind}"}
    types |= dict.fromkeys(("bias", "out"), "*bf16") | dict.fromkeys(("order", "owner"), "*i32")
    types["weights"] = f"tensordesc<{kind}[{OUTPUTS}, {step}],{layout!r}>"
    fixed = {"GROUPS": groups, "ROW_BLOCK": 128, "HAS_BIAS": True, "PLACED": placed, "WEIGHED": True, "ROWS": rows}
    fixed["STAGES"] = expert_stream.stages_of(rows, steps, step * bits // 8, groups)
    names = expert_stream.stream_experts.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("x", "inputs")}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(expert_stream.stream_experts, signature, constants, aligned)
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": OUTPUTS // 16, "launch_pdl": True})
    ptx = kernel.asm["ptx"]
    waits, lets = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
    assert (ptx.index("cp.async.bulk.tensor") < waits) == placed, "weights wait for the kernel ahead"
    assert (lets < waits) == placed, "the next kernel starts before it is known whose experts pairs are"
    return int(kernel.metadata.shared) + OF_THE_SYSTEM


def check_experts_of_prompts(in_fp8: bool, entering: bool) -> None:
    """Registers last, and products are not waited for one by one."""
    kind, bits = ("fp8e4nv", 8) if in_fp8 else ("bf16", 16)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    tiles = f"tensordesc<{kind}[128, {8 * expert_prompts.STEP_BYTES // bits}],{layout!r}>"
    types = dict.fromkeys(("weight_scales", "x_scales", "pair_weights", "inner_scales"), "*fp32") | {"out": "*bf16"}
    types |= {"x": f"*{kind}" if entering else tiles, "weights": tiles, "inner": f"*{kind}"}
    types |= dict.fromkeys(("order", "owner"), "*i32")
    copying = expert_prompts.GATHERING if entering else expert_prompts.COPYING
    fixed = {"ENTERING": entering, "KIND": "silu", "LIMIT": None, "DTYPE": gl.bfloat16, "WEIGHED": True}
    fixed |= {"STAGES": expert_prompts.STAGES, "TAKEN": expert_prompts.taken(copying), "COPYING": copying}
    fixed |= {} if in_fp8 else dict.fromkeys(("weight_scales", "x_scales", "inner_scales"))
    names = expert_prompts.stay_experts.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
    aligned |= {(names.index(name),): [["tt.divisibility", 16]] for name in ("inputs", "outputs")}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(expert_prompts.stay_experts, signature, constants, aligned)
    options = {"num_warps": 4, "maxnreg": expert_prompts.LAUNCHED, "launch_pdl": True}
    kernel = triton.compile(source, target=HOPPER, options=options)
    assert int(kernel.metadata.shared) + OF_THE_SYSTEM <= SHARED_MEMORY
    code = code_of(kernel)
    assert not re.search(r"\b(STL|LDL)\b", code), "there are not enough registers"
    assert code.count("GMMA.64x128") == 2 * 2 * 4, "two groups of warps, two halves of a tile, four products"
    assert code.count("WARPGROUP.DEPBAR") <= 4


def main() -> None:
    assert HAS_GLUON
    for in_fp8 in (False, True):
        for entering in (False, True):
            check_experts_of_prompts(in_fp8, entering)
    for rows, splits in ((8, 1), (FEW_ROWS, 3)):
        for groups in (0, 32, MOST_FACTORS // rows):
            assert shared_memory(rows, splits, groups, alone=True) <= SHARED_MEMORY
            assert shared_memory(rows, splits, groups, alone=False) <= SHARED_MEMORY // 2
    rows = max(TILE_ROWS)
    for groups in (0, MOST_FACTORS // rows):
        assert shared_memory(rows, 2, groups, alone=True) <= SHARED_MEMORY
    assert shared_memory(rows, 3, MOST_FACTORS // rows, alone=True, outputs=WIDE_OUTPUTS) <= SHARED_MEMORY
    for tile, inputs, in_fp8 in (
        (8, 7168, True),
        (16, 2048, True),
        (32, 512, True),
        (64, 2048, True),
        (8, 2048, False),
    ):
        for placed in (False, True):
            taken = shared_memory_of_experts(tile, inputs, in_fp8, placed)
            together = expert_stream.FP8_TOGETHER if in_fp8 else expert_stream.TOGETHER
            assert taken * together <= SHARED_MEMORY, (tile, inputs, taken)


if __name__ == "__main__":
    main()
