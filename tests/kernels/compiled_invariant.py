"""Builds the invariant kernels for Hopper, which needs no GPU. Run by `test_invariant_kernels.py`.

Whatever a call looks like - few rows or many, a part in float32 or a result, lengths that are aligned or not - the same
instructions have to multiply: others may add up in another order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx.kernels.gpu import invariant

HOPPER = GPUTarget("cuda", 90, 32)
MULTIPLIES = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)")
KIB = 1024
MOST_SHARED = 227 * KIB


def multiplying(
    kernel: triton.JITFunction, types: Mapping[str, str], fixed: Mapping[str, object], aligned: bool, warps: int,
    stages: int,
) -> list[str]:  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    whole = [name for name in types if types[name].startswith("*") or aligned]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    built = triton.compile(
        source, target=HOPPER, options={"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    )
    assert built.metadata.shared <= MOST_SHARED
    return MULTIPLIES.findall(built.asm["ptx"])


def main() -> None:
    tile = invariant.HALF_TILE
    numbers = dict.fromkeys(("rows", "outputs", "inputs", "leaf_width"), "i32")
    sizes = {"HAS_BIAS": False, "bias": None, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
    found = [
        multiplying(
            invariant._product, numbers | {"x": "*bf16", "weight": "*bf16", "out": out}, sizes, aligned, tile.warps,
            tile.stages,
        )
        for out in ("*bf16", "*fp32")
        for aligned in (True, False)
    ]  # fmt: skip
    assert found[0]
    assert {shape for each in found for shape in each} == {f"m64n{tile.rows}k16"}, found
    assert len({len(each) for each in found}) == 1, "as many of them in every build"


if __name__ == "__main__":
    main()
