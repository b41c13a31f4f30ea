"""Drafts of gated delta nets whose states are streamed, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import random

import torch

from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreter import backwards, make_ready


def main() -> None:
    """Sequences of one to four tokens, which go on behind any of them, beside rows that fill up, in few programs."""
    make_ready()
    drafts = interpreted("phalanx.kernels.gpu.delta_draft_stream")
    from phalanx.kernels.gpu import delta
    from tests.kernels.delta_nets import Nets, random_net

    taken = []
    step = drafts.step
    drafts.multiprocessors = lambda device: 1
    drafts.is_streamed = lambda net, most, states: most > 1
    drafts.step = lambda *args: (taken.append(len(args[0])), step(*args))
    assert delta.HAS_GLUON
    torch.manual_seed(0)
    draw = random.Random(0)
    nets = Nets(random_net((1, 2), (128, 128), 4, torch.float32, "cpu"), 6, most=4)
    filling = (nets.spare, 0, 1)
    nets.check([(3, 0, 4)], 1e-5)
    nets.check([(3, 2, 3), filling, filling, (1, 0, 4), (0, 0, 9), (4, 0, 1)][:4], 1e-5)
    reached = {3: 5, 1: 4}
    for at in range(8):
        spans = []
        for place, end in reached.items():
            start, count = max(0, end - draw.randrange(3)), 1 + draw.randrange(4)
            spans.append((place, start, count))
            reached[place] = start + count
        with backwards():
            nets.check([*spans[:1], filling, *spans[1:], filling] if at % 2 else spans, 1e-5)
    nets.check([(2, 0, 3), (3, reached[3], 2), (1, 0, 1), (0, 0, 5)], 1e-5)
    print(len(taken))


if __name__ == "__main__":
    main()
