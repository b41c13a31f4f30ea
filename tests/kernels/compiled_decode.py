"""Builds decode attention over an FP8 cache for Hopper, which needs no GPU. Run by `test_decode.py`."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx.kernels.gpu.attention import _decode

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = {"SINKS": False, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE": 16, "SPLITS": 1, "GROUP": 16, "DIM": 128}
SIZES |= {"out_scales": None, "LARGEST": 448.0}


def instructions(tokens: int, warps: int, stages: int) -> str:
    types = (
        {"cache": "*fp8e4nv", "tables": "*i32"}
        | dict.fromkeys(("q", "out"), "*bf16")
        | dict.fromkeys(("slots", "positions"), "*i64")
    )
    types |= dict.fromkeys(("partial", "peaks", "totals", "sinks"), "*fp32") | dict.fromkeys(
        ("scale", "value_scale"), "fp32"
    )
    types |= dict.fromkeys(("q_stride", "table_width", "window", "out_rows"), "i32")
    fixed, names = SIZES | {"TOKENS": tokens}, _decode.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    aligned = [name for name in types if types[name].startswith("*") or name == "q_stride"]
    source = ASTSource(
        _decode,
        signature,
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    return str(triton.compile(source, target=HOPPER, options=options).asm["ptx"])


def main() -> None:
    for how in ((64, 2, 4), (128, 4, 3)):
        ptx = instructions(*how)
        assert "ld.shared.b8" not in ptx, "values are read byte by byte"
        assert "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx


if __name__ == "__main__":
    main()
