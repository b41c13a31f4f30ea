"""States copied by the Triton kernel on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from phalanx.kernels.gpu import states as gpu
from phalanx.kernels.states import States
from tests.kernels.interpreter import make_ready


def check(pairs: int) -> None:
    """Of layers whose states differ in size and dtype, the largest longer than one program copies."""
    places = 2 * pairs + 1
    kept = [
        torch.randn(places, 3, 41, 73),
        torch.randn(places, 4, 6).to(torch.bfloat16),
        torch.randn(places, 8192).to(torch.bfloat16),
    ]
    copied = [state.clone() for state in kept]
    source, target = torch.randperm(places)[: 2 * pairs].view(2, pairs)
    States(kept).copy(source, target, apart=True)
    states = States(copied)
    gpu.copy_states(states.table, states.most_words, source, target)
    for one, other in zip(kept, copied, strict=True):
        assert torch.equal(one, other)


if __name__ == "__main__":
    make_ready()
    torch.manual_seed(0)
    for pairs in (1, 3):
        check(pairs)
