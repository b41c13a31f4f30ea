"""Attention of prompts by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from triton.language.extra import cuda

from phalanx.kernels.attention import PrefillTiles, prefill_attention_torch, tile_prompt
from phalanx.kernels.gpu import attention

PAGE = 8


def check_prompts(heads: int, kv_heads: int, head_dim: int, window: int | None, spans: list[tuple[int, int]]) -> None:
    """Prompts from their start, or chunks of longer ones, against a cache that already holds this step's keys."""
    tokens, width = sum(count for _, count in spans), 40
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    cache = torch.randn(len(spans) * width, PAGE, 2, kv_heads, head_dim)
    tables = torch.randperm(len(cache)).view(len(spans), width)
    tiles, first = [], 0
    for sequence, (start, count) in enumerate(spans):
        positions = torch.arange(start, start + count)
        places = tables[sequence, positions // PAGE] * PAGE + positions % PAGE
        cache.flatten(0, 1)[places] = qkv[first : first + count, heads:].unflatten(1, (2, kv_heads))
        tiles += tile_prompt(sequence, first, count, start)
        first += count
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32), any(start for start, _ in spans))
    found, wanted = (torch.full((tokens, heads, head_dim), float("nan")) for _ in range(2))
    attention.prefill_attention(qkv, heads, cache, cut, window, 0.2, found)
    prefill_attention_torch(qkv[:, :heads], cache, cut, window, 0.2, wanted)
    torch.testing.assert_close(found, wanted)


def main() -> None:
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    torch.manual_seed(0)
    for window in (None, 40):
        check_prompts(4, 2, 16, window, [(0, 130), (0, 5)])
        check_prompts(4, 2, 16, window, [(37, 130), (0, 129), (64, 5)])
        check_prompts(3, 3, 24, window, [(37, 20), (0, 129)])


if __name__ == "__main__":
    main()
