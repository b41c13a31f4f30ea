"""Gated delta nets by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
import triton.language as tl

from phalanx.kernels.gpu import delta, delta_parts, delta_prompts
from tests.kernels.delta_nets import Nets, random_net
from tests.kernels.interpreter import backwards, make_ready


def main() -> None:
    """Prompts from their start, then cut at odd places, beside rows of one token that begin or go on."""
    make_ready()
    torch.manual_seed(0)
    delta_prompts.CHANNELS_AT_ONCE, delta_prompts.ROWS_AT_ONCE = 64, 64
    delta_prompts.WIDE = delta_prompts.Along(16, 1, tl.float32)
    delta_parts.ROWS_AT_ONCE = 64
    delta.FEW_PROGRAMS, delta.FEW_COLUMNS, delta.FEWER_COLUMNS = 4, 16, 8
    shared = Nets(random_net((1, 2), (16, 32), 4, torch.float32, "cpu"), 5)
    shared.check([(3, 0, 1), (shared.spare, 0, 1), (1, 0, 63), (0, 0, 64), (4, 0, 65)], 1e-5)
    shared.check([(3, 1, 1), (1, 63, 1), (0, 64, 2), (4, 65, 130)], 1e-5)
    shared.check([(3, 2, 1), (0, 0, 1), (1, 64, 3)], 1e-5)
    for step in range(20):
        shared.check([(2, step, 1), (shared.spare, 0, 1), (3, 3 + step, 1)], 1e-5)
    drafts = Nets(random_net((1, 2), (16, 32), 4, torch.float32, "cpu"), 6, most=9)
    filling = (drafts.spare, 0, 1)
    drafts.check([(3, 0, 1), filling, filling, (2, 0, 9), (0, 0, 3), (1, 0, 10), (4, 0, 70)], 1e-5)
    drafts.check([(3, 1, 4), filling, (2, 4, 9), (0, 3, 2), (1, 10, 1), (4, 70, 6), filling], 1e-5)
    drafts.check([(3, 3, 7), (2, 13, 1), (4, 71, 65), (1, 11, 20)], 1e-5)
    with backwards():
        drafts.check([(3, 4, 1), (1, 31, 2), (2, 14, 8), (4, 136, 1), filling, (0, 0, 5)], 1e-5)
        drafts.check([(3, 5, 3), filling, (1, 32, 1), (2, 21, 9), (0, 2, 4)], 1e-5)
    for step in range(20):
        drafts.check([(3, 7 + step, 1), filling, (2, 25 + step, 1), (1, 33 + step, 1)], 1e-5)
    drafts.check([(3, 27, 9), (2, 45, 1), (1, 53, 2)], 1e-5)
    few = Nets(random_net((1, 2), (16, 32), 4, torch.float32, "cpu"), 4, most=4)
    few.check([(3, 0, 4)], 1e-5)
    few.check([(3, 2, 3), (few.spare, 0, 1), (1, 0, 4), (0, 0, 9)], 1e-5)
    few.check([(1, 3, 4)], 1e-5)
    for step in range(9):
        few.check([(1, 4 + step, 1), (3, 5 + step, 1), (few.spare, 0, 1), (0, 9 + step, 1)], 1e-5)
    few.check([(1, 13, 4), (3, 14, 1), (0, 18, 2)], 1e-5)
    few.check([(1, 15, 1), (3, 15, 1), (0, 19, 1)], 1e-5)
    for most in (2, 3):
        short = Nets(random_net((1, 2), (16, 32), 4, torch.float32, "cpu"), 3, most=most)
        for step in range(12):
            short.check([(1, step, most), (short.spare, 0, 1), (0, 2 * (step // 2), 1 + step % most)], 1e-5)
    odd = Nets(random_net((2, 2), (12, 5), 3, torch.float32, "cpu"), 4)
    odd.check([(2, 0, 1), (0, 0, 129), (3, 0, 2)], 1e-5)
    odd.check([(2, 1, 1), (0, 129, 1), (3, 2, 17)], 1e-5)
    narrow = Nets(random_net((1, 2), (16, 16), 4, torch.float16, "cpu"), 3)
    narrow.check([(1, 0, 1), (2, 0, 70)], 2e-3)
    narrow.check([(1, 1, 1), (2, 70, 1)], 2e-3)
    delta_prompts.NARROW = {torch.float16: delta_prompts.Along(16, 1, tl.float16)}
    narrow.check([(1, 2, 80), (0, 0, 65)], 2e-3)
    rounded = Nets(random_net((1, 2), (16, 32), 4, torch.float32, "cpu"), 4, most=2, state_dtype=torch.bfloat16)
    rounded.check([(3, 0, 1), (rounded.spare, 0, 1), (1, 0, 63), (0, 0, 65)], 1e-5)
    for step in range(9):
        rounded.check([(3, 1 + step, 1), (1, 63 + step, 1)], 1e-5)
        rounded.check([(2, step, 2), (rounded.spare, 0, 1), (0, 65 + step, 1)], 1e-5)
    rounded.check([(3, 10, 70)], 1e-5)
    shared.alike = True
    shared.check([(2, 0, 66)], 1e-5)


if __name__ == "__main__":
    main()
