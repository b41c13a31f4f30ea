"""Steps of compressed attention, by the Triton kernels and by definition: in the interpreter, or on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import compressed as defined
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.gpu import compressed, compressed_rows, hyper
from phalanx.kernels.hyper import Weights, mix_streams_torch, part_streams_torch
from phalanx.kernels.indexer import choose_gpu, rows_of
from phalanx.kernels.norm import add_rms_norm_torch
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from phalanx.spec.hyper import Hyper

EPS = 1e-6


class Where(NamedTuple):
    """On which device, in what precision, and how far off by the norm of what is compared."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    error: float = 1e-5
    rope: int = 6

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def turns(self, tokens: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.randn(2, tokens, 1, self.rope // 2).unbind()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def close(self, found: Tensor, wanted: Tensor) -> None:
        assert not found.isnan().any()
        off = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-9)
        assert off < self.error, float(off)


class Step:
    """Rows of one token, then prompts from a position on; their slots are in no order."""

    def __init__(self, lengths: list[int], spans: list[tuple[int, int]], page: int, device: str = "cpu") -> None:
        starts = [length - 1 for length in lengths] + [start for start, _ in spans]
        counts = [1] * len(lengths) + [count for _, count in spans]
        self.page, self.places = page, len(starts) + 1
        width = -(-max(map(sum, zip(starts, counts, strict=True))) // page)
        self.blocks = self.places * width
        tables = torch.randperm(self.blocks).view(self.places, width).int().to(device)
        slots = torch.randperm(self.places)[: len(starts)]
        tiles, alone = [(0, 0, 0, 0, 0)], len(lengths)
        self.tokens = alone
        for slot, (start, count) in zip(slots[alone:].tolist(), spans, strict=True):
            tiles += tile_prompt(slot, self.tokens, count, start)
            self.tokens += count
        positions = torch.tensor(starts[:alone], device=device)
        decode = DecodeRows(tables, slots[:alone].to(device), positions) if alone else None
        cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32, device=device), True) if spans else None
        batch = AttentionBatch(torch.empty(0), decode, [], cut)
        self.rows = rows_of(batch, self.tokens)
        self.together = defined.together(batch, page)


def check_turned(where: Where, tokens: int, heads: int, width: int) -> None:
    """From columns of a wider matrix."""
    x, weight, turns = where.randn(tokens, heads * width + 8)[:, 8:], where.wide(width), where.turns(tokens)
    x = x.unflatten(1, (heads, width))
    wide, cos, sin = x.float(), turns[0].float(), turns[1].float()
    where.close(compressed_rows.turn(x, turns), defined.turn(wide, cos, sin))
    where.close(compressed_rows.turn_back(x, turns), defined.turn(wide, cos, -sin))
    for factor in (weight, weight.to(where.dtype), None):
        by = torch.ones(width, device=x.device) if factor is None else factor.float()
        normed = add_rms_norm_torch(wide, None, by, EPS)
        where.close(compressed_rows.norm_and_turn(x, factor, EPS, turns), defined.turn(normed, cos, sin))


def check_kept(where: Where, step: Step, ratio: int, halves: int, width: int) -> None:
    """Entries that are completed, in their places, and the rings behind the step."""
    span, columns = halves * ratio, halves * width
    inputs, ring = where.randn(step.tokens, 2 * columns), where.randn(step.places, span, 2 * columns)
    bias, weight = where.wide(ratio, columns), where.wide(width)
    cos, sin = where.turns(int(step.rows.positions.max()) + 1)
    begin = (step.rows.positions + 1 - ratio).clamp_min(0)
    found = torch.zeros(step.blocks, defined.room(step.page, ratio), width, dtype=where.dtype, device=where.device)
    wanted = torch.zeros_like(found, dtype=torch.float32)
    compressed_rows.compress(inputs, ring, bias, weight, EPS, (cos[begin], sin[begin]), found, step.rows, step.page)
    closed = defined.closing(step.together, ratio, span, step.page)
    if closed.found:
        made = defined.compress(defined.sources(ring, inputs, closed).float(), closed.present, bias)
        made = add_rms_norm_torch(made, None, weight, EPS)[:, None]
        turned = defined.turn(made, cos[closed.positions].float(), sin[closed.positions].float())[:, 0]
        wanted.flatten(0, 1)[closed.write_to] = turned
    where.close(found, wanted)
    other = ring.clone()
    compressed_rows.remember(ring, inputs, step.rows)
    for rows in step.together:
        defined.remember(other, inputs, rows)
    assert torch.equal(ring, other)


def check_attention(
    where: Where, step: Step, heads: int, dim: int, window: int, ratio: int = 0, slack: int = 0, top: int | None = None
) -> None:
    q, new = where.randn(step.tokens, heads, dim), where.randn(step.tokens, dim)
    ring = where.randn(step.places, window + slack, dim)
    sinks, room, scale = where.wide(heads), defined.room(step.page, ratio or 1), dim**-0.5
    entries, keys = where.randn(step.blocks, room, dim), where.randn(step.blocks, room, 24)
    index_q, weights = where.randn(step.tokens, 16, 24), where.wide(step.tokens, 16)
    chosen = None
    if top is not None:
        best = choose_gpu(index_q, weights, keys, step.rows, top, ratio, step.page)
        assert best is not None
        chosen = best.positions
    held = entries if ratio else None
    found = compressed.attend(q, new, ring, held, ratio, step.page, step.rows, window, chosen, sinks, scale)
    wanted = torch.full_like(q, float("nan"), dtype=torch.float32)
    lines = [defined.line(ring, new, rows, window).float() for rows in step.together]
    for of, first, rows in defined.tiles(step.together):
        kept = lines[of][:, first : first + window - 1 + rows.at.shape[1]]
        allowed = defined.near(rows, window)
        if ratio:
            seen = defined.far(rows, ratio, step.page)
            if top is not None:
                index = keys.flatten(0, 1)[seen.places]
                seen = defined.choose(index_q[rows.at], weights[rows.at], index, seen, top)
            kept = torch.cat((kept, entries.flatten(0, 1)[seen.places].float()), 1)
            allowed = torch.cat((allowed, seen.allowed), -1)
        wanted[rows.at] = defined.attend(q[rows.at].float(), kept, allowed, sinks, scale)
    where.close(found, wanted)


def check_streams(where: Where, tokens: int, streams: int, hidden: int, rounds: int, begins: bool) -> None:
    """`begins`: all streams are one and the same, which lies there once."""
    made = where.randn(tokens, 1, hidden).expand(-1, streams, -1) if begins else where.randn(tokens, streams, hidden)
    count, told = streams * (streams + 2), Hyper(streams, rounds, 1e-6)
    weights = Weights(where.wide(count, streams * hidden) * 0.1, where.wide(count), where.wide(3), EPS)
    mapped = F.linear(made.flatten(1).float(), weights.fn)
    taken, *mixing = hyper.part_streams(made, mapped, weights.base, weights.scale, EPS, told)
    wanted, wanted_mixing = part_streams_torch(made.float(), weights, told)
    where.close(taken, wanted)
    for found, right in zip(mixing, wanted_mixing, strict=True):
        where.close(found, right)
    given = where.randn(tokens, hidden)
    wanted = mix_streams_torch(made.float(), given.float(), wanted_mixing)
    where.close(hyper.mix_streams(made, given, *mixing), wanted)
