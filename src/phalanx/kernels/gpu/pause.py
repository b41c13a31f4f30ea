"""A kernel that only takes its time."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.gpu.stamps import stamp_begin, stamp_end, taken


@triton.jit
def _cycles():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["cycles"])
def _pause(cycles, stamp):
    stamp_begin(stamp)
    begun = _cycles()
    now = begun
    while now - begun < cycles:
        now = _cycles()
    stamp_end(stamp)


def pause(cycles: int) -> None:
    """So many of a multiprocessor's. Neither it nor what follows starts early."""
    _pause[(1,)](cycles, taken(), num_warps=1)
