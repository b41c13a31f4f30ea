"""Compressed attention and hyper-connections by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.language.extra import cuda

from phalanx.kernels import compressed as defined
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.gpu import compressed, compressed_rows, hyper, latent
from phalanx.kernels.hyper import Weights, mix_streams_torch, part_streams_torch
from phalanx.kernels.indexer import choose_gpu, rows_of
from phalanx.kernels.norm import add_rms_norm_torch
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from phalanx.spec.hyper import Hyper

ROPE, EPS = 6, 1e-6


class Step:
    """Rows of one token, then prompts from a position on; the slots are in no order."""

    def __init__(self, lengths: list[int], spans: list[tuple[int, int]], page: int) -> None:
        starts = [length - 1 for length in lengths] + [start for start, _ in spans]
        counts = [1] * len(lengths) + [count for _, count in spans]
        self.page, self.places = page, len(starts) + 1
        width = -(-max(map(sum, zip(starts, counts, strict=True))) // page)
        self.blocks = self.places * width
        self.tables = torch.randperm(self.blocks).view(self.places, width).int()
        slots = torch.randperm(self.places)[: len(starts)]
        tiles, first = [(0, 0, 0, 0, 0)], len(lengths)
        for slot, (start, count) in zip(slots[first:].tolist(), spans, strict=True):
            tiles += tile_prompt(slot, first, count, start)
            first += count
        alone, self.tokens = len(lengths), first
        positions = torch.tensor([length - 1 for length in lengths])
        decode = DecodeRows(self.tables, slots[:alone], positions) if alone else None
        cut = PrefillTiles(self.tables, torch.tensor(tiles, dtype=torch.int32), True) if spans else None
        self.batch = AttentionBatch(torch.empty(0), decode, [], cut)
        self.rows = rows_of(self.batch, self.tokens)
        self.together = defined.together(self.batch, page)


def turns_of(tokens: int) -> tuple[Tensor, Tensor]:
    half = torch.randn(2, tokens, 1, ROPE // 2)
    return torch.cat((half[0], half[0]), -1), torch.cat((-half[1], half[1]), -1)


def check_turned(tokens: int, heads: int, width: int) -> None:
    """From columns of a wider matrix."""
    x, weight, turns = torch.randn(tokens, heads * width + 5)[:, 5:], torch.randn(width), turns_of(tokens)
    x = x.unflatten(1, (heads, width))
    torch.testing.assert_close(compressed_rows.turn(x, turns), defined.turn(x, *turns))
    torch.testing.assert_close(compressed_rows.turn_back(x, turns), defined.turn(x, turns[0], -turns[1]))
    for factor in (weight, None):
        normed = add_rms_norm_torch(x, None, torch.ones(width) if factor is None else factor, EPS)
        found = compressed_rows.norm_and_turn(x, factor, EPS, turns)
        torch.testing.assert_close(found, defined.turn(normed, *turns))


def check_kept(step: Step, ratio: int, halves: int, width: int) -> None:
    """Entries that are completed, in their places, and the rings behind the step."""
    span, columns = halves * ratio, halves * width
    inputs, ring = torch.randn(step.tokens, 2 * columns), torch.randn(step.places, span, 2 * columns)
    bias, weight = torch.randn(ratio, columns), torch.randn(width)
    found, wanted = torch.zeros(2, step.blocks, defined.room(step.page, ratio), width).unbind()
    cos = torch.randn(int(step.rows.positions.max()) + 1, 1, ROPE // 2)
    at = (step.rows.positions + 1 - ratio).clamp_min(0)
    turns = torch.cat((cos, cos), -1)[at], torch.cat((-cos, cos), -1)[at]
    compressed_rows.compress(inputs, ring, bias, weight, EPS, turns, found, step.rows, step.page)
    closed = defined.closing(step.together, ratio, span, step.page)
    if closed.found:
        made = defined.compress(defined.sources(ring, inputs, closed), closed.present, bias)
        made = add_rms_norm_torch(made, None, weight, EPS)
        cos = cos[closed.positions]
        turned = defined.turn(made[:, None], torch.cat((cos, cos), -1), torch.cat((-cos, cos), -1))[:, 0]
        wanted.flatten(0, 1)[closed.write_to] = turned
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    other = ring.clone()
    compressed_rows.remember(ring, inputs, step.rows)
    for rows in step.together:
        defined.remember(other, inputs, rows)
    assert torch.equal(ring, other)


def check_attention(
    step: Step, heads: int, dim: int, window: int, ratio: int = 0, slack: int = 0, top: int | None = None
) -> None:
    q, new = torch.randn(step.tokens, heads, dim), torch.randn(step.tokens, dim)
    ring = torch.randn(step.places, window + slack, dim)
    sinks, room = torch.randn(heads), defined.room(step.page, ratio or 1)
    entries, keys = torch.randn(step.blocks, room, dim), torch.randn(step.blocks, room, 24)
    index_q, weights = torch.randn(step.tokens, 3, 24), torch.randn(step.tokens, 3)
    chosen = None
    if top is not None:
        best = choose_gpu(index_q, weights, keys, step.rows, top, ratio, step.page)
        assert best is not None
        chosen = best.positions
    held = entries if ratio else None
    found = compressed.attend(q, new, ring, held, ratio, step.page, step.rows, window, chosen, sinks, 0.2)
    wanted = torch.full_like(q, float("nan"))
    lines = [defined.line(ring, new, rows, window) for rows in step.together]
    for of, first, rows in defined.tiles(step.together):
        kept = lines[of][:, first : first + window - 1 + rows.at.shape[1]]
        allowed = defined.near(rows, window)
        if ratio:
            seen = defined.far(rows, ratio, step.page)
            if top is not None:
                index = keys.flatten(0, 1)[seen.places]
                seen = defined.choose(index_q[rows.at], weights[rows.at], index, seen, top)
            kept = torch.cat((kept, entries.flatten(0, 1)[seen.places]), 1)
            allowed = torch.cat((allowed, seen.allowed), -1)
        wanted[rows.at] = defined.attend(q[rows.at], kept, allowed, sinks, 0.2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def check_streams(tokens: int, streams: int, hidden: int, rounds: int, begins: bool) -> None:
    made = torch.randn(tokens, 1, hidden).expand(-1, streams, -1) if begins else torch.randn(tokens, streams, hidden)
    count = streams * (streams + 2)
    weights = Weights(torch.randn(count, streams * hidden) * 0.1, torch.randn(count), torch.randn(3), 1e-6)
    told = Hyper(streams, rounds, 1e-6)
    mapped = F.linear(made.flatten(1), weights.fn)
    taken, mixing = hyper.part_streams(made, mapped, weights.base, weights.scale, weights.norm_eps, told)
    wanted, wanted_mixing = part_streams_torch(made, weights, told)
    torch.testing.assert_close(taken, wanted, rtol=1e-4, atol=1e-4)
    for found, right in zip(mixing, wanted_mixing, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    given = torch.randn(tokens, hidden)
    torch.testing.assert_close(
        hyper.mix_streams(made, given, mixing), mix_streams_torch(made, given, mixing), rtol=1e-4, atol=1e-4
    )


def check_splits() -> None:
    """Cut as for tensor cores, and shared by several programs."""
    usual = latent.shape_of
    compressed.shape_of = lambda *_: latent.Shape(16, 16, 4, 3)
    check_attention(Step([130, 1, 65, 40], [], 8), 20, 24, 30, ratio=4)
    compressed.shape_of = usual


def main() -> None:
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    torch.manual_seed(0)
    for tokens, heads, width in ((3, 1, 20), (2, 9, 16), (1, 5, 6)):
        check_turned(tokens, heads, width)
    compressed_rows.NUMBERS_AT_ONCE = 64
    compressed_rows.COLUMNS_AT_ONCE = 16
    for ratio, halves, page in ((4, 2, 16), (3, 2, 5), (7, 1, 4), (1, 1, 8), (5, 2, 16)):
        check_kept(
            Step([12, 1, ratio, 8, 21, 35], [(0, 18), (10, 23), (ratio - 1, 1), (3, 2)], page), ratio, halves, 20
        )
    check_kept(Step([4, 8, 3], [], 8), 4, 2, 12)
    mixed = [(0, 18), (10, 40), (29, 3)]
    check_attention(Step([1, 16, 33, 7], [], 8), 5, 20, 9)
    check_attention(Step([40], mixed, 8), 3, 16, 9, slack=4)
    check_attention(Step([1, 16, 33, 70], [], 8), 5, 20, 9, ratio=4, slack=3)
    check_attention(Step([40, 3], mixed, 16), 3, 24, 9, ratio=3)
    check_attention(Step([64], [(0, 140)], 4), 2, 16, 8, ratio=7)
    check_attention(Step([70, 3, 33, 100], [], 8), 5, 20, 9, ratio=4, top=5)
    check_attention(Step([40, 3], mixed, 16), 3, 16, 9, ratio=3, top=4)
    latent.READERS = 12
    check_splits()
    hyper.COLUMNS_AT_ONCE = 16
    check_streams(3, 4, 40, 20, False)
    check_streams(2, 3, 24, 2, True)


if __name__ == "__main__":
    main()
