"""Gated delta nets whose states are streamed, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreter import make_ready


def main() -> None:
    """Programs with several heads each, odd numbers of them, of sequences that begin, go on and are nobody's."""
    make_ready()
    delta_stream = interpreted("phalanx.kernels.gpu.delta_stream")
    from phalanx.kernels.gpu import delta
    from tests.kernels.delta_nets import Nets, random_net

    delta_stream.multiprocessors = lambda device: 1
    delta_stream.is_streamed = lambda *_: True
    assert delta.HAS_GLUON
    torch.manual_seed(0)
    nets = Nets(random_net((1, 3), (128, 128), 4, torch.float32, "cpu"), 5)
    nets.check([(2, 0, 1), (nets.spare, 0, 1), (4, 0, 3)], 1e-5)
    for step in range(1, 17):
        nets.check([(2, step, 1), (nets.spare, 0, 1), (4, 2 + step, 1)], 1e-5)
    nets.check([(2, 0, 1)], 1e-5)
    ten = Nets(random_net((2, 4), (128, 128), 4, torch.float16, "cpu"), 5, updates=10)
    for step in range(11):
        ten.check([(place, step, 1) for place in (3, 0)], 4e-3)
    drafts = Nets(random_net((1, 1), (128, 128), 4, torch.float32, "cpu"), 3, most=9)
    drafts.check([(1, 0, 9), (2, 0, 5)], 1e-5)
    for step in range(11):
        drafts.check([(1, 4 + step, 1), (drafts.spare, 0, 1), (2, 3 + step, 1)], 1e-5)
    drafts.check([(1, 15, 3), (2, 14, 1)], 1e-5)
    rounded = Nets(random_net((1, 3), (128, 128), 4, torch.float32, "cpu"), 3, state_dtype=torch.bfloat16)
    for step in range(11):
        rounded.check([(2, step, 1), (rounded.spare, 0, 1)], 1e-5)


if __name__ == "__main__":
    main()
