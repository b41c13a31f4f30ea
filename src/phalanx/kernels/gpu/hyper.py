"""Hyper-connections: several residual streams, a program for every token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.spec.hyper import Hyper

COLUMNS_AT_ONCE = 1024


@triton.jit
def _balanced(logits, known, eps, ROUNDS: tl.constexpr):
    """Rows and columns that sum to 1, as far as so many rounds bring them there; what is not known stays zero."""
    shares = tl.where(known, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
    comb = tl.where(known, shares / tl.maximum(tl.sum(shares, 1), 1e-30)[:, None] + eps, 0.0)
    comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    for _ in range(ROUNDS - 1):
        comb = comb / (tl.sum(comb, 1) + eps)[:, None]
        comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    return comb


@triton.jit
def _part_streams(
    streams, mapped, base, scale, taken, post, comb, by_token, by_stream, norm_eps, eps, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, ROUNDS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a part takes of one token's streams, and how they go on. `mapped` is of streams that are not normed yet."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    stream, other = tl.arange(0, WIDE)[:, None], tl.arange(0, WIDE)[None, :]
    s, column = tl.arange(0, WIDE), tl.arange(0, BLOCK)[None, :]
    wait_for_ahead()
    source, made = streams + token * by_token + stream * by_stream, mapped + token * (STREAMS * (STREAMS + 2))
    squares = tl.zeros([WIDE, BLOCK], tl.float32)
    for first in range(0, HIDDEN, BLOCK):
        mask = (stream < STREAMS) & (first + column < HIDDEN)
        x = tl.load(source + first + column, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    shrink = tl.rsqrt(tl.sum(squares) / (STREAMS * HIDDEN) + norm_eps)
    known = s < STREAMS
    pre = tl.load(made + s, mask=known, other=0.0) * shrink * tl.load(scale) + tl.load(base + s, mask=known, other=0.0)
    given = tl.load(made + STREAMS + s, mask=known, other=0.0) * shrink * tl.load(scale + 1)
    given += tl.load(base + STREAMS + s, mask=known, other=0.0)
    tl.store(post + token * STREAMS + s, 2 * tl.sigmoid(given), mask=known)
    both, at = (stream < STREAMS) & (other < STREAMS), 2 * STREAMS + stream * STREAMS + other
    logits = tl.load(made + at, mask=both, other=0.0) * shrink * tl.load(scale + 2)
    logits = tl.where(both, logits + tl.load(base + at, mask=both, other=0.0), -1.0e30)
    spot = token * (STREAMS * STREAMS) + stream * STREAMS + other
    tl.store(comb + spot, _balanced(logits, both, eps, ROUNDS), mask=both)
    weight = tl.where(known, tl.sigmoid(pre) + eps, 0.0)[:, None]
    for first in range(0, HIDDEN, BLOCK):
        mask = (stream < STREAMS) & (first + column < HIDDEN)
        x = tl.load(source + first + column, mask=mask, other=0.0).to(tl.float32)
        place = first + tl.arange(0, BLOCK)
        tl.store(taken + token * HIDDEN + place, tl.sum(x * weight, 0).to(taken.dtype.element_ty), mask=place < HIDDEN)


def part_streams(
    streams: Tensor, mapped: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hyper: Hyper
) -> tuple[Tensor, Tensor, Tensor]:
    """What a part takes of streams, [tokens, streams, hidden], whose last dimension lies together; what it gives to
    each of them, and what they give to each other.

    `mapped` is the linear map of all streams of a token, without their norm.
    """
    tokens, count, hidden = streams.shape
    taken = streams.new_empty(tokens, hidden)
    post, comb = mapped.new_empty(tokens, count), mapped.new_empty(tokens, count, count)
    _part_streams[(tokens,)](
        streams, mapped, base, scale, taken, post, comb, *streams.stride()[:2], norm_eps, hyper.eps, STREAMS=count,
        HIDDEN=hidden, ROUNDS=hyper.rounds, WIDE=triton.next_power_of_2(count),
        BLOCK=min(COLUMNS_AT_ONCE, triton.next_power_of_2(hidden)), num_warps=8, launch_pdl=starts_early(),
    )  # fmt: skip
    return taken, post, comb


@triton.jit
def _mix_streams(
    streams, given, post, comb, out, by_token, by_stream, STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one token's streams."""
    let_next_start()
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream, inside = tl.arange(0, WIDE), column < HIDDEN
    dtype = out.dtype.element_ty
    wait_for_ahead()
    added = tl.load(given + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(post + token * STREAMS + stream, mask=stream < STREAMS, other=0.0).to(dtype).to(tl.float32)
    acc = (share[:, None] * added[None, :]).to(dtype).to(tl.float32)
    mixed = tl.zeros([WIDE, BLOCK], tl.float32)
    for source in tl.static_range(STREAMS):
        x = tl.load(streams + token * by_token + source * by_stream + column, mask=inside, other=0.0).to(tl.float32)
        at = (token * STREAMS + source) * STREAMS + stream
        weight = tl.load(comb + at, mask=stream < STREAMS, other=0.0).to(dtype).to(tl.float32)
        mixed += weight[:, None] * x[None, :]
    place = out + (token * STREAMS + stream[:, None]) * HIDDEN + column[None, :]
    result = (acc + mixed.to(dtype).to(tl.float32)).to(dtype)
    tl.store(place, result, mask=(stream < STREAMS)[:, None] & inside[None, :])


def mix_streams(streams: Tensor, given: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams behind a part that gives `given`, [tokens, hidden]."""
    tokens, count, hidden = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(hidden))
    _mix_streams[(tokens, triton.cdiv(hidden, block))](
        streams, given.contiguous(), post.contiguous(), comb.contiguous(), out, *streams.stride()[:2],
        STREAMS=count, HIDDEN=hidden, WIDE=triton.next_power_of_2(count), BLOCK=block, launch_pdl=starts_early(),
    )  # fmt: skip
    return out
