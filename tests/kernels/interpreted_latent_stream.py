"""Latents of rows of one token that are streamed, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.tiling import DecodeRows
from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreter import make_ready

RANK, ROPE, PAGE = 512, 64, 16
HEADS, NOPE = 3, 32


def check(lengths: list[int], others: float, readers: int = 1) -> None:
    """As by the kernel for all cards, which reads nothing behind the last token: there lies what others left."""
    from phalanx.kernels.gpu import latent, latent_stream

    rows, width = len(lengths), max(lengths) // PAGE + 2
    positions, slots = torch.tensor(lengths) - 1, torch.randperm(rows)
    cache = torch.full((rows * width, PAGE, RANK + ROPE), others, dtype=torch.float16)
    tables = torch.randperm(len(cache)).view(rows, width).int()
    for slot, length in zip(slots, lengths, strict=True):
        places = torch.arange(length)
        cache.flatten(0, 1)[tables[slot, places // PAGE] * PAGE + places % PAGE] = torch.randn(
            length, RANK + ROPE
        ).half()
    brought = torch.randn(rows, HEADS, RANK).half() * 0.1
    cos, sin = torch.randn(2, rows, 1, ROPE).unbind()
    asked = latent.LatentQueries(brought, torch.randn(rows, HEADS, NOPE + ROPE).half(), cos, sin)
    latent.READERS = readers
    found: list[Tensor] = []
    for is_streamed in (True, False):
        latent_stream.attends = lambda *_, told=is_streamed: told
        found.append(torch.full((rows, HEADS, RANK), float("nan")).half())
        latent.decode_latents(asked, cache, DecodeRows(tables, slots, positions), 0.05, found[-1])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def main() -> None:
    make_ready()
    interpreted("phalanx.kernels.gpu.latent_stream")
    torch.manual_seed(0)
    check([70, 1, 64, 33, 129], 0.0)
    check([130, 15], 3.0, readers=12)
    for broken in (float("nan"), float("inf")):
        check([70, 1, 64, 128], broken)
        check([129, 200], broken, readers=12)


if __name__ == "__main__":
    main()
