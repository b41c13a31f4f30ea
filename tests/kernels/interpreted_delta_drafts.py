"""Drafts of gated delta nets whose states are streamed, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreter import backwards, make_ready


def main() -> None:
    """Sequences of one to four tokens, which go on behind any of them, beside rows that fill up, in two programs that
    look at a few rows at once.
    """
    make_ready()
    drafts = interpreted("phalanx.kernels.gpu.delta_draft_stream")
    from phalanx.kernels.gpu import delta
    from tests.kernels.delta_nets import Nets, random_net

    taken, step = [], drafts.step
    drafts.multiprocessors = lambda device: 1
    drafts.is_streamed = lambda net, most, *_: most > 1
    drafts.step = lambda *args: (taken.append(len(args[0])), step(*args))
    drafts._ROWS_AT_ONCE = 4
    assert delta.HAS_GLUON
    torch.manual_seed(0)
    four = Nets(random_net((1, 2), (128, 128), 4, torch.float32, "cpu"), 6, most=4)
    filling = (four.spare, 0, 1)
    four.check([(3, 0, 4)], 1e-5)
    four.check([(3, 2, 3), filling, filling, (1, 0, 4), (4, 0, 1), (0, 0, 9)], 1e-5)
    four.check([filling, (1, 1, 4), (3, 5, 1), filling, (0, 9, 2)], 1e-5)
    with backwards():
        four.check([(1, 5, 3), (3, 6, 4), (4, 0, 2), (0, 10, 4)], 1e-5)
        four.check([(3, 7, 4), filling, (0, 10, 1), (1, 8, 4)], 1e-5)
    for at in range(3):
        four.check([(1, 9 + 4 * at, 4), (0, 11 + at, 2)], 1e-5)
    assert len(taken) == 8
    three = Nets(random_net((1, 3), (128, 128), 4, torch.float16, "cpu"), 3, most=3, updates=10)
    for at in range(4):
        three.check([(1, 2 * at, 3), (three.spare, 0, 1), (0, 3 * at, 3)], 4e-3, quantised=at % 2 == 1)
    two = Nets(random_net((2, 2), (128, 128), 4, torch.float32, "cpu"), 2, most=2)
    for at in range(5):
        two.check([(1, at, 2), (0, 2 * at, 2)], 1e-5)
    rounded = Nets(random_net((1, 2), (128, 128), 4, torch.float32, "cpu"), 3, most=4, state_dtype=torch.bfloat16)
    for at in range(4):
        rounded.check([(1, 2 * at, 4), (rounded.spare, 0, 1), (0, 3 * at, 3)], 1e-5)
    assert len(taken) == 21


if __name__ == "__main__":
    main()
