"""The sorting of experts by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from triton import language
from triton.language.extra import cuda

from phalanx.kernels.gpu import moe


def check_sort(tokens: int, top: int, experts: int, tile: int) -> None:
    """Every pair lies once in a tile of its expert, whichever way is taken."""
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
    order, owner = moe.sort_by_expert(chosen, experts, tile)
    rows = order.view(-1, tile)
    pairs = [(pair, expert) for row, expert in zip(rows.tolist(), owner.tolist(), strict=True) for pair in row]
    assert sorted((pair, expert) for pair, expert in pairs if pair < chosen.numel()) == list(
        enumerate(chosen.flatten().tolist())
    )


def main() -> None:
    cuda.gdc_wait = cuda.gdc_launch_dependents = language.debug_barrier = lambda: None
    torch.manual_seed(0)
    for few in (moe.FEW_PAIRS, 0):
        moe.FEW_PAIRS = few
        check_sort(33, 4, 60, 16)
        check_sort(70, 2, 5, 16)


if __name__ == "__main__":
    main()
