"""Compressed attention and hyper-connections by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from phalanx.kernels.gpu import compressed, compressed_rows, hyper, latent
from tests.kernels.compressed_steps import Step, Where, check_attention, check_kept, check_streams, check_turned
from tests.kernels.interpreter import make_ready

HERE = Where()
MIXED = [(0, 5), (10, 12), (29, 3)]


def check_parts() -> None:
    """Cut as for tensor cores, with several programs for a token."""
    latent.READERS = 12
    usual, compressed.shape_of = compressed.shape_of, lambda *_: latent.LatentTile(16, 16, 4, 3)
    check_attention(HERE, Step([70, 1, 40], [], 8), 20, 24, 30, ratio=4)
    check_attention(HERE, Step([70, 1], [], 8), 3, 16, 40)
    compressed.shape_of = usual


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    for tokens, heads, width in ((3, 1, 20), (2, 9, 16), (1, 5, 6)):
        check_turned(HERE, tokens, heads, width)
    compressed_rows.NUMBERS_AT_ONCE, compressed_rows.COLUMNS_AT_ONCE = 64, 16
    for ratio, halves, page in ((4, 2, 16), (3, 2, 5), (7, 1, 4), (1, 1, 8)):
        step = Step([12, 1, ratio, 21], [(0, 9), (10, 17), (ratio - 1, 1), (3, 2)], page)
        check_kept(HERE, step, ratio, halves, 20)
    check_kept(HERE, Step([4, 8, 3], [], 8), 4, 2, 12)
    check_attention(HERE, Step([1, 16, 33, 7], [], 8), 5, 20, 9)
    check_attention(HERE, Step([40], MIXED, 8), 3, 16, 9, slack=4)
    check_attention(HERE, Step([1, 16, 33, 70], [], 8), 5, 20, 9, ratio=4, slack=3)
    check_attention(HERE, Step([40, 3], MIXED, 16), 3, 24, 9, ratio=3)
    check_attention(HERE, Step([], [(30, 12)], 4), 2, 16, 8, ratio=7)
    check_attention(HERE, Step([70, 3, 33], [], 8), 5, 20, 9, ratio=4, top=5)
    check_attention(HERE, Step([40, 3], MIXED, 16), 3, 16, 9, ratio=3, top=4)
    check_parts()
    hyper.COLUMNS_AT_ONCE = 16
    check_streams(HERE, 3, 4, 40, 20, False)
    check_streams(HERE, 2, 3, 24, 2, True)


if __name__ == "__main__":
    main()
