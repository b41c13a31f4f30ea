"""`kernels.states` on a GPU: one launch for all layers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 8192


@triton.jit(do_not_specialize_on_alignment=["source", "target"])
def _copy_states(table, source, target, WORDS: tl.constexpr):
    """Some words of one layer's state, from one place to another."""
    first, layer, pair = tl.program_id(0) * WORDS, tl.program_id(1), tl.program_id(2)
    count = tl.load(table + 2 * layer + 1)
    if first < count:
        state = tl.load(table + 2 * layer).to(tl.pointer_type(tl.int32))
        word = first + tl.arange(0, WORDS)
        known = word < count
        kept = tl.load(state + tl.load(source + pair) * count + word, mask=known)
        tl.store(state + tl.load(target + pair) * count + word, kept, mask=known)


def copy_states(table: Tensor, most_words: int, source: Tensor, target: Tensor) -> None:
    grid = (triton.cdiv(most_words, _WORDS), len(table), len(source))
    _copy_states[grid](table, source, target, WORDS=_WORDS, num_warps=8)
