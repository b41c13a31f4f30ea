"""Builds every GPU kernel for every kind of card, on a machine that has none: `python benchmarks/kernels.py`.

The wrappers are called as a model's step calls them, on the host's memory, and what they would launch is compiled down
to the card's own code. A kernel that does not build, takes more shared memory than the card has, or that no case here
launches, is named, and the exit status is 1. `--target 80 --kernel latents` builds a part.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import JITFunction
from triton.backends.compiler import GPUTarget

from phalanx.kernels.cache import UNSCALED, Fresh, HeadNorms
from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.draft_rows import Cache, Sequences, StepRows
from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import E4M3, Form, Fp8Weight
from phalanx.kernels.gpu import (
    all_reduce,
    attention,
    attention_early,
    compressed,
    compressed_rows,
    delta,
    delta_draft_stream,
    delta_stream,
    drafts,
    early,
    expert_prompts,
    expert_stream,
    four_bit,
    four_bit_persistent,
    four_bit_stream,
    gemm,
    hyper,
    indexer,
    invariant,
    latent,
    latent_prompts,
    latent_rows,
    latent_stream,
    lookup,
    moe,
    pause,
    route,
    router,
    rows,
    sampling,
    shared_memory,
    shortlist,
    stamps,
    states,
    stream,
)
from phalanx.kernels.pairs import Unsummed
from phalanx.kernels.sampling_table import PARAMETERS, TOKEN
from phalanx.kernels.tiling import DecodeRows, PrefillTiles
from phalanx.kernels.unnormed import Unnormed
from phalanx.spec.delta import updates_beside
from phalanx.spec.ffn import SILU, Router
from phalanx.spec.hyper import Hyper

KIB = 1024
SHARED_MEMORY = {
    80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB, 121: 99 * KIB,
}  # fmt: skip
"""What one program may take, by compute capability (CUDA programming guide)."""
CARDS = {
    80: "A100", 86: "RTX 3090, A40", 89: "RTX 4090, L40S", 90: "H100, H200", 100: "B200",
    120: "RTX 5090, RTX PRO 6000", 121: "DGX Spark",
}  # fmt: skip
HAS_FP8 = 89
"""The first capability that converts e4m3."""
HOPPER = 90
HALF = torch.bfloat16
Case = Callable[[], object]


class Built(NamedTuple):
    name: str
    shared: int


class NoDriver:
    """Says what Triton asks before it builds; every kind of card is a device of its own."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def some(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def whole(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attending(cache_dtype: torch.dtype, dtype: torch.dtype = HALF, fp8: bool = False) -> Iterator[Case]:
    shapes = [(16, 8, 256, None), (32, 8, 128, None), (64, 8, 64, some(64, dtype=torch.float32))]
    if dtype != HALF or cache_dtype != HALF:
        shapes = shapes[1:2] if dtype != HALF else shapes[:1]
    for heads, kv_heads, dim, sinks in shapes:
        cache = some(8, 16, 2, kv_heads, dim, dtype=cache_dtype)
        for count in (1, 64) if dim == 128 else (64,):
            qkv = some(count, heads + 2 * kv_heads, dim, dtype=dtype)
            places = DecodeRows(whole(count, 4), torch.arange(count), torch.arange(count))
            out = some(count, heads, dim, dtype=dtype)
            in_fp8 = [rows.empty_quantised(count, heads * dim, out.device)] if dim == 128 and fp8 else []
            for given in (out, *in_fp8):
                yield lambda q=qkv[:, :heads], c=cache, p=places, o=given, s=sinks: attention.decode_attention(
                    q, c, p, None, 0.1, o, sinks=s
                )
        tiles = PrefillTiles(whole(1, 8), whole(2, 5), True)
        prompt = some(200, heads + 2 * kv_heads, dim, dtype=dtype)
        for window in (None,) if sinks is None else (64,):
            in_fp8 = [rows.empty_quantised(200, heads * dim, prompt.device)] if dim == 128 and fp8 else []
            for given in (some(200, heads, dim, dtype=dtype), *in_fp8):
                yield (
                    lambda q=prompt, h=heads, c=cache, t=tiles, w=window, s=sinks, o=given: attention.prefill_attention(
                        q, h, c, t, w, 0.1, o, sinks=s
                    )
                )


def attending_early(cache_dtype: torch.dtype) -> Iterator[Case]:
    """One row whose heads come as they were computed."""
    for heads, kv_heads, dim, sinks in ((32, 8, 128, None), (64, 8, 64, some(64, dtype=torch.float32))):
        cache, qkv = some(8, 16, 2, kv_heads, dim, dtype=cache_dtype), some(1, heads + 2 * kv_heads, dim)
        one, places = torch.zeros(1, dtype=torch.int64), DecodeRows(whole(4, 4), torch.arange(1), torch.arange(1))
        fresh = Fresh(some(1, 1, dim), some(1, 1, dim), one, UNSCALED)
        in_fp8 = [rows.empty_quantised(1, heads * dim, qkv.device)] if dim == 128 else []
        for out in (some(1, heads, dim), *in_fp8):
            yield lambda q=qkv, h=heads, c=cache, p=places, o=out, s=sinks, f=fresh: attention_early.decode_early(
                q, h, c, p, None, 0.1, o, 1.0, s, f
            )


def latents(dtype: torch.dtype = HALF) -> Iterator[Case]:
    rank, rope = (512, 64) if dtype == HALF else (32, 16)
    cache = some(8, 16, rank + rope, dtype=dtype)
    tiles = PrefillTiles(whole(1, 8), whole(2, 5), True)
    for heads, nope, v in ((20, 192, 256), (128, 128, 128)) if dtype == HALF else ((16, 128, 128),):
        for count, best in ((1, None), (128, None), (1, whole(1, 64, dtype=torch.int64))):
            asked = _queries(count, heads, nope, rank, rope, dtype)
            places = DecodeRows(whole(count, 4), torch.arange(count), torch.arange(count))
            yield lambda a=asked, p=places, b=best: latent.decode_latents(a, cache, p, 0.1, a.brought, b)
        asked = _queries(200, heads, nope, rank, rope, dtype)
        yield lambda a=asked: latent.prefill_latents(a, cache, tiles, 0.1, a.brought)
        wide, kept = some(200, heads, nope + v, dtype=dtype), some(200, rank + rope, dtype=dtype)
        yield lambda a=asked, w=wide, k=kept, v=v: latent_prompts.prefill_wide(
            *a[1:], w, k, tiles, 0.1, some(*a.q.shape[:2], v, dtype=dtype)
        )
    turn = some(4, 1, rope, dtype=dtype)
    yield lambda: latent_rows.keep_latents(
        some(4, 1536 + rank + rope, dtype=dtype)[:, 1536:], some(rank, dtype=dtype), 1e-6, turn, turn,
        whole(4, dtype=torch.int64), cache,
    )  # fmt: skip
    matrices = some(16, 256, rank, dtype=dtype)
    for count in (1, 128):
        x, brought = some(count, 16, 128 + rope, dtype=dtype)[..., :128], some(count, 16, rank, dtype=dtype)
        yield lambda x=x, b=brought: latent_rows.by_heads(x, matrices[:, :128], b)
        yield lambda b=brought: latent_rows.by_heads(b, matrices[:, 128:].mT, some(len(b), 16, 128, dtype=dtype))
    yield lambda: indexer.index_scores(
        some(4, 64, 128, dtype=dtype), some(4, 64, dtype=torch.float32), some(8, 16, 128, dtype=dtype), whole(4, 4),
        torch.arange(4), torch.arange(4), 64,
    )  # fmt: skip


def streamed_latents() -> Iterator[Case]:
    cache = some(8, 16, 576)
    for heads, nope, v in ((20, 192, 256), (16, 128, 128)):
        matrices = some(heads, nope + v, 512)
        for count, splits in ((1, 64), (128, 1)):
            asked, out = _queries(count, heads, nope, 512, 64, HALF), some(count, heads, v)
            peaks = some(count, heads, splits, dtype=torch.float32)
            partial = some(count, heads, splits, 512, dtype=torch.float32) if splits > 1 else None
            yield lambda a=asked, n=count, p=partial, k=peaks, s=splits: latent_stream.attend(
                *a, cache, whole(n, 4), torch.arange(n), torch.arange(n), 0.1, a.brought, p, k, k, s
            )
            yield lambda a=asked, m=matrices[:, :nope], n=nope: latent_stream.by_heads(a.q[..., :n], m, a.brought)
            yield lambda a=asked, m=matrices[:, nope:].mT, o=out: latent_stream.by_heads(a.brought, m, o)


def _queries(count: int, heads: int, nope: int, rank: int, rope: int, dtype: torch.dtype) -> latent.LatentQueries:
    turn = some(count, 1, rope, dtype=dtype)
    return latent.LatentQueries(
        some(count, heads, rank, dtype=dtype), some(count, heads, nope + rope, dtype=dtype), turn, turn
    )


def compressed_attention(dtype: torch.dtype = HALF) -> Iterator[Case]:
    heads, dim, index_dim, rope, top = (64, 512, 128, 64, 512) if dtype == HALF else (4, 64, 32, 16, 64)
    turn, sinks = some(4, 1, rope, dtype=dtype), some(heads, dtype=torch.float32)
    new, ring = some(4, dim, dtype=dtype), some(3, 128, dim, dtype=dtype)
    rows = DecodeRows(whole(3, 400), torch.arange(4) % 3, torch.arange(4))
    many = DecodeRows(whole(3, 400), torch.arange(200) % 3, torch.arange(200))
    for weight in (None, some(dim, dtype=torch.float32)):
        yield lambda w=weight: compressed_rows.norm_and_turn(some(4, heads, dim, dtype=dtype), w, 1e-6, (turn, turn))
    yield lambda: compressed_rows.turn_back(some(4, heads, dim, dtype=dtype), (turn, turn))
    yield lambda: compressed_rows.remember(ring, new, rows)
    for ratio, width, halves in ((4, dim, 2), (4, index_dim, 2), (128, dim, 1)):
        inputs, kept = (
            some(4, 2 * halves * width, dtype=dtype),
            some(3, halves * ratio, 2 * halves * width, dtype=dtype),
        )
        bias, weight = some(ratio, halves * width, dtype=torch.float32), some(width, dtype=torch.float32)
        entries = some(8, -(-16 // ratio), width, dtype=dtype)
        yield lambda i=inputs, k=kept, b=bias, w=weight, e=entries: compressed_rows.compress(
            i, k, b, w, 1e-6, (turn, turn), e, rows, 16
        )
    for ratio, best in ((0, None), (4, whole(200, top, dtype=torch.int64)), (128, None)):
        for places in (rows, many):
            count, entries = len(places.slots), some(8, 4, dim, dtype=dtype)
            yield lambda r=ratio, b=best, p=places, m=count, e=entries: compressed.attend(
                some(m, heads, dim, dtype=dtype), some(m, dim, dtype=dtype), ring, e, r, 16, p, 128,
                None if b is None else b[:m], sinks, 0.1,
            )  # fmt: skip
    yield lambda: indexer.index_scores(
        some(4, heads, index_dim, dtype=dtype), some(4, heads, dtype=torch.float32), some(8, 4, index_dim, dtype=dtype),
        rows.tables, rows.slots, rows.positions, 64, 4, 16,
    )  # fmt: skip
    streams, hyper_connected = some(4, 4, 4096, dtype=dtype), Hyper(4, 20, 1e-6)
    mixing = some(4, 4, dtype=torch.float32), some(4, 4, 4, dtype=torch.float32)
    yield lambda: hyper.part_streams(
        streams, some(4, 24, dtype=torch.float32), some(24, dtype=torch.float32), some(3, dtype=torch.float32), 1e-6,
        hyper_connected,
    )  # fmt: skip
    yield lambda: hyper.mix_streams(streams, some(4, 4096, dtype=dtype), *mixing)


def delta_nets(quantised: bool, dtype: torch.dtype = HALF, state_dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    for k_heads, v_heads, dim in ((16, 32, 128), (4, 8, 64))[: 1 if quantised or dtype != HALF else 2]:
        channels = (2 * k_heads + v_heads) * dim
        heads = some(2, v_heads, dtype=torch.float32)
        net = DeltaWeights(
            k_heads, v_heads, dim, dim, some(channels, 4, dtype=dtype), *heads, some(dim, dtype=dtype), 1e-6
        )
        tiles = PrefillTiles(whole(3, 4), whole(2, 5), True)
        states, since = some(3, v_heads, dim, dim, dtype=state_dtype), whole(3, v_heads, dim)
        for most, count in ((1, 2), (1, 2 * delta.FEW_PROGRAMS // v_heads), (4, 2), (4, 9), (9, 2)):
            decode = DecodeRows(whole(3, 4), torch.arange(count), torch.arange(count))
            qkvz, columns = (
                some(count, channels + v_heads * dim, dtype=dtype),
                some(3, 3 + most, channels, dtype=dtype),
            )
            updates = some(3, updates_beside(most), v_heads, 2 * dim + 1, dtype=torch.float32)
            given = qkvz, some(count, 2 * v_heads, dtype=dtype), net, states, columns, decode, tiles
            pending = PendingUpdates(updates, since, most)
            yield lambda g=given, p=pending, q=quantised and dim == 128: delta.delta_net(*g, p, q)


def streamed_deltas() -> Iterator[Case]:
    for v_heads, most, updates in ((32, 1, 8), (48, 1, 10), (32, 9, 18)):
        for given in _streamed(v_heads, most, updates):
            yield lambda g=given: delta_stream.step(*g)


def streamed_drafts() -> Iterator[Case]:
    for v_heads, most, updates in ((32, 4, 8), (48, 2, 8), (32, 3, 10)):
        for given in _streamed(v_heads, most, updates):
            yield lambda g=given: delta_draft_stream.step(*g)


def streamed_narrow() -> Iterator[Case]:
    """With states in bf16, a token of a sequence and four."""
    first, second = (next(_streamed(32, most, 8, torch.bfloat16)) for most in (1, 4))
    yield lambda: delta_stream.step(*first)
    yield lambda: delta_draft_stream.step(*second)


def _streamed(
    v_heads: int, most: int, updates: int, state_dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Any, ...]]:
    """A step's operands, in FP8, bf16 and float32."""
    count, dim, device = 9, delta_stream.DIM, torch.device("cpu")
    for dtype, out in (
        (HALF, rows.empty_quantised(count, v_heads * dim, device)),
        (HALF, some(count, v_heads * dim)),
        (torch.float32, some(count, v_heads * dim, dtype=torch.float32)),
    ):
        channels, heads = (32 + v_heads) * dim, some(2, v_heads, dtype=torch.float32)
        net = DeltaWeights(16, v_heads, dim, dim, some(channels, 4, dtype=dtype), *heads, some(dim, dtype=dtype), 1e-6)
        qkvz, given = some(count, channels + v_heads * dim, dtype=dtype), some(count, 2 * v_heads, dtype=dtype)
        states, columns = some(3, v_heads, dim, dim, dtype=state_dtype), some(3, 3 + most, channels, dtype=dtype)
        pending = PendingUpdates(
            some(3, updates, v_heads, 2 * dim + 1, dtype=torch.float32), whole(3, v_heads, dim), most
        )
        decode = DecodeRows(whole(3, 4), torch.arange(count), torch.arange(count))
        yield qkvz, given, net, states, columns, pending, decode, out


def by_rows(quantised: bool, cache_dtype: torch.dtype, dtype: torch.dtype = HALF) -> Iterator[Case]:
    x, gates = some(4, 4096, dtype=dtype), some(4, 2 * 1024, dtype=dtype)
    pairs = Unsummed(some(32, 4096, dtype=dtype), 8)
    for form in (Form.FP8, Form.BOTH) if quantised else (Form.PLAIN,):
        yield lambda f=form: rows.add_rms_norm(x, x.clone(), some(4096, dtype=dtype), 1e-5, f)
        yield lambda f=form: rows.add_rms_norm(x, None, some(4096, dtype=torch.float32), 1e-5, f)
        yield lambda f=form: rows.add_rms_norm(pairs, x.clone(), some(4096, dtype=dtype), 1e-5, f)
    for beside, gate in ((None, None), (x, None), (x, some(4, 1, dtype=dtype))):
        yield lambda b=beside, g=gate: rows.sum_pairs(pairs, b, g)
    yield lambda: rows.gate_and_mul(gates, SILU, quantised)
    yield lambda: rows.sigmoid_and_mul(x, x.clone(), quantised)
    if quantised:
        yield lambda: rows.quantise(x)
    for weight, rotary in ((None, 128), (dtype, 128), (torch.float32, 64)):
        norms = None if weight is None else HeadNorms(some(128, dtype=weight), some(128, dtype=weight), 1e-6)
        yield lambda n=norms, r=rotary: rows.rotate_and_store(
            some(4, 48, 128, dtype=dtype), some(4, 1, r, dtype=dtype), some(4, 1, r, dtype=dtype),
            whole(4, dtype=torch.int64), some(8, 16, 2, 8, 128, dtype=cache_dtype), 32, 8, n,
        )  # fmt: skip
    yield lambda: rows.cos_and_sin(whole(4, dtype=torch.int64), some(64, dtype=torch.float32), 1.0, dtype)


def products() -> Iterator[Case]:
    for outputs, inputs in ((4096, 4096), (96, 320)):
        for count in (1, 8, 64):
            yield lambda n=outputs, k=inputs, m=count: gemm.product(some(m, k), some(n, k), some(n))
    x = some(1, 256)
    yield lambda: gemm.matrix_vector(x, some(64, 256), None)
    yield lambda: gemm.wide_product(some(8, 320), some(128, 320, dtype=torch.float32), None)
    yield lambda: gemm.take_apart(some(128, 320, dtype=torch.float32))


def fp8_products() -> Iterator[Case]:
    for outputs, inputs in ((4096, 4096), (WIDE, 4096), (96, 320)):
        weight = Fp8Weight.empty(outputs, inputs, row_block=32, device=torch.device("cpu"))
        for count in (1, 16, 64, 128):
            x = rows.empty_quantised(count, inputs, torch.device("cpu"))
            yield lambda x=x, w=weight: gemm.fp8_product(x, w, None, HALF)


def widened_products() -> Iterator[Case]:
    weight = Fp8Weight.empty(4096, 4096, row_block=128, device=torch.device("cpu"))
    for count in (1, 64):
        yield lambda m=count: gemm.widened_product(some(m, 4096), weight, some(4096))


WIDE = gemm.WIDE_FROM


def held(numbers: Any, group: int, scale_dtype: torch.dtype, *shape: int) -> FourBitWeight:
    zeros, factors = numbers == "int4", scale_dtype == E4M3
    return FourBitWeight.empty(
        *shape, numbers=numbers, group=group, scale_dtype=scale_dtype, zeros=zeros, factors=factors,
        device=torch.device("cpu"),
    )  # fmt: skip


FOUR_BITS: list[tuple[Any, int, torch.dtype]] = [("int4", 128, torch.float16), ("e2m1", 32, torch.uint8)]
NVFP4: tuple[Any, int, torch.dtype] = ("e2m1", 16, E4M3)


def four_bit_products(forms: list[tuple[Any, int, torch.dtype]]) -> Iterator[Case]:
    for form in forms:
        weight = held(*form, 4096, 4096)
        for count in (*four_bit.TILES, 300) if form == FOUR_BITS[0] else (16, 128, 300):
            yield lambda w=weight, m=count: four_bit.product(some(m, 4096), w, None)


def streamed_four_bits() -> Iterator[Case]:
    order, owner, pairs = whole(256), whole(16), 100
    weights = some(pairs, dtype=torch.float32)
    for form in FOUR_BITS:
        weight, stack = held(*form, 4096, 4096), held(*form, 8, 1024, 512)
        for count in four_bit_stream.ROW_TILES:
            yield lambda w=weight, m=count: four_bit_stream.product(some(m, 4096), w, some(4096), whole(4096))
            for known in (False, True):
                yield lambda s=stack, m=count, k=known: four_bit_stream.grouped_product(
                    some(25, 512), s, None, order, owner, 4, weights, pairs, m, whole(4096), placed=k
                )
        for count in four_bit_persistent.WAYS:
            yield lambda w=weight, m=count: four_bit_persistent.product(some(m, 4096), w, some(4096), whole(4096))
        for count in four_bit_persistent.GROUPED_WAYS:
            for known in (False, True):
                yield lambda s=stack, m=count, k=known: four_bit_persistent.grouped_product(
                    some(25, 512), s, None, order, owner, 4, weights, pairs, m, whole(4096), placed=k
                )


def routes(forms: list[Form]) -> Iterator[Case]:
    logits, correction, gate = some(40, 128), some(128, dtype=torch.float32), some(40, 1)
    for score in ("softmax", "chosen_softmax", "sigmoid", "sqrt_softplus"):
        yield lambda s=score: route.route(logits, Router(128, 8, s, renormalise=True), None, None, False, None)
    in_groups = Router(128, 8, "sigmoid", renormalise=True, groups=8, kept_groups=4)
    yield lambda: route.route(logits, in_groups, correction, None, True, None)
    yield lambda: route.route(logits.float(), in_groups, correction, None, True, gate)
    told = whole(len(logits), 8, dtype=torch.int64)
    yield lambda: route.route(logits, in_groups, correction, told, False, None)
    for width, dtype, gated in ((2048, HALF, True), (2880, HALF, False), (7168, torch.float32, False)):
        weight = some(128 + gated, width, dtype=dtype)
        asked = (in_groups, correction) if dtype == torch.float32 else (Router(128, 8), None)
        for count in (count for count in (1, 8, 32) if router.share_of(count, weight)):
            for x in (some(count, width), *(unnormed(count, width, form) for form in forms)):
                yield lambda x=x, w=weight, a=asked: router.score_and_route(x, w, None, *a, whole(2048), None, True)
    wide = some(128, 2048, dtype=torch.float32)
    yield lambda: router.score_and_route(
        some(8, 2048), wide, some(128, dtype=torch.float32), in_groups, correction, whole(1024), told[:8], False
    )


def unnormed(count: int, width: int, form: Form) -> Unnormed:
    x, residual, kept = (some(count, width) for _ in range(3))
    return Unnormed(x, residual, kept, some(width), 1e-5, form)


def experts(forms: list[Any]) -> Iterator[Case]:
    for form in forms:
        for count in (1, 8, 300, 3000):
            yield lambda f=form, m=count: _experts(f, m)


def _experts(form: Any, count: int) -> None:
    number, hidden, inner, top = 32, 1024, 512, 4
    shapes = ((number, 2 * inner, hidden), (number, hidden, inner))
    if form is None:
        gate_up, down = (some(*shape) for shape in shapes)
    elif form == "fp8":
        gate_up, down = (Fp8Weight.empty(*shape, row_block=128, device=torch.device("cpu")) for shape in shapes)
    else:
        gate_up, down = (held(*form, *shape) for shape in shapes)
    chosen = (torch.arange(count * top) % number).view(count, top).int()
    weights = some(count, top, dtype=torch.float32)
    moe.expert_pairs(some(count, hidden), (gate_up, None), (down, None), weights, chosen, SILU, False)


def sums(quantised: bool) -> Iterator[Case]:
    peers = all_reduce.Peers(0, 4, whole(4, dtype=torch.int64))
    yield lambda: all_reduce.one_shot(some(4, 4096), peers)
    yield lambda: all_reduce.two_shot(some(256, 4096), peers)
    for form in (Form.FP8, Form.BOTH) if quantised else (Form.PLAIN,):
        yield lambda f=form: all_reduce.one_shot_add_rms_norm(some(4, 4096), some(4, 4096), some(4096), 1e-5, f, peers)
    edges = torch.tensor([0, 256, 512, 768, 1024])
    yield lambda: all_reduce.gather_columns(some(4, 256), [256] * 4, edges, peers)


def routed_with_norm() -> None:
    asked, weight = unnormed(4, 4096, Form.PLAIN), some(32, 4096)
    router.score_and_route(asked, weight, None, Router(32, 4), None, whole(256), None, False)


def stamped() -> Iterator[Case]:
    """Kernels that say when they begin, as those of a step that is traced."""
    x, weight, place = some(4, 4096), some(4096), whole(2, dtype=torch.int64)
    norms = [lambda x=x: rows.add_rms_norm(x, some(4, 4096), weight, 1e-5) for x in (x, Unsummed(some(32, 4096), 8))]
    for case in (stamps.stamp, lambda: pause.pause(1000), *norms, routed_with_norm, *sums(False)):
        yield lambda case=case: (stamps.want(place), case())
    yield lambda: pause.pause(1000)


def in_one_order(dtype: torch.dtype) -> Iterator[Case]:
    for outputs, inputs, leaves in ((4096, 4096, 8), (6144, 4096, 4), (128256, 4096, 1), (96, 320, 2)):
        weight, bias = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype)
        for count, given in ((1, dtype), (64, torch.float32)):
            yield lambda w=weight, b=bias, m=count, n=leaves, g=given: invariant.product(
                some(m, w.shape[1], dtype=dtype), w, b, n, g
            )
    for ranks in (2, 4, 8):
        yield lambda r=ranks: invariant.join_ranks(some(4, 4096 * r, dtype=torch.float32), r, dtype)
    gate_up, down = some(32, 1024, 1024, dtype=dtype), some(32, 1024, 512, dtype=dtype)
    weights, chosen = some(40, 4, dtype=torch.float32), (torch.arange(160) % 32).view(40, 4).int()
    shared = some(8, 40, 1024, dtype=torch.float32)
    for beside in (None, shared):
        yield lambda b=beside: invariant.experts(
            some(40, 1024, dtype=dtype), gate_up, down, weights, chosen, SILU, 8, dtype, b
        )
    for heads, kv_heads, dim, window in ((32, 8, 128, None), (9, 3, 64, 100)):
        cache, sinks = some(8, 16, 2, kv_heads, dim, dtype=dtype), some(heads, dtype=torch.float32)
        queries = some(40, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
        places = DecodeRows(whole(40, 4), torch.arange(40), torch.arange(40))
        for sunk in (None, sinks):
            yield lambda q=queries, c=cache, p=places, w=window, s=sunk: invariant.attention(q, c, p, w, False, 0.1, s)


def choosing() -> Iterator[Case]:
    for dtype in (HALF, torch.float32):
        yield lambda d=dtype: sampling.likeliest(some(3, 50000, dtype=d))
        yield lambda d=dtype: sampling.flag_broken(whole(3, dtype=TOKEN), some(3, 50000, dtype=d))
        yield lambda d=dtype: sampling.draw(
            some(3, 50000, dtype=d), whole(8, PARAMETERS, dtype=torch.int64), torch.arange(3), torch.arange(3)
        )
    kept, pool = whole(64, dtype=TOKEN), whole(8, dtype=TOKEN)
    at, tables = whole(8, dtype=torch.int64), whole(1, 8, 4)
    yield lambda: lookup.look_up(kept, pool, at, tables, torch.arange(3), torch.arange(3), 16)
    yield lambda: lookup.keep_sampled(pool, at, torch.arange(3), torch.arange(3), whole(3, dtype=TOKEN))
    table = whole(8, PARAMETERS, dtype=torch.int64)
    yield lambda: lookup.take_in(tables, table, kept, at, torch.arange(12), 4)
    yield lambda: lookup.tokens_at(kept, tables[0], torch.arange(3), torch.arange(3), 16)
    yield from guessing(Cache(kept, tables, 16))
    for width, inputs in ((248320, 2048), (16160, 7168)):
        scores, hidden, weight = some(3, width), some(3, inputs), some(1, inputs)
        yield lambda s=scores, h=hidden, w=weight: shortlist.look_again(s, h, w, 0)
    yield lambda: shortlist.best_of_ranks(some(3, 16, dtype=torch.float32))
    yield lambda: states.copy_states(whole(2, 2, dtype=torch.int64), 20000, torch.arange(3), torch.arange(3))


def guessing(cache: Cache) -> Iterator[Case]:
    number, tokens = torch.arange(3), whole(3, dtype=TOKEN)
    rows, sequences = StepRows(number, number, tokens, number, number), Sequences(number, number, number, number)
    for most, ahead in ((1, 1), (2, 1), (4, 3), (4, 0)):
        for offset in (0, 1):
            yield lambda m=most, a=ahead, o=offset: drafts.prove(cache, rows, tokens, sequences, m, o, a)
    for offset in (0, 1):
        yield lambda o=offset: drafts.keep_draft(cache, sequences, number, whole(3, 3, dtype=TOKEN), tokens, 1, o)


def before_a_head(dtype: torch.dtype) -> Iterator[Case]:
    norms, x = (some(2048, dtype=dtype), some(2048, dtype=dtype)), some(3, 2048, dtype=dtype)
    for tokens in (None, whole(3, dtype=TOKEN)):
        yield lambda t=tokens: drafts.side_by_side(x, x, norms, 1e-6, t)


def _wide_and_half(cases_of: Callable[[torch.dtype], Iterator[Case]]) -> Iterator[Case]:
    yield from cases_of(HALF)
    yield from cases_of(torch.float32)


def cases(kernel: str, capability: int) -> Iterator[Case]:
    """What a card of this kind is given: without e4m3 conversions, FP8 weights are widened in the product."""
    fp8 = capability >= HAS_FP8
    match kernel:
        case "rows":
            yield from _wide_and_half(lambda dtype: by_rows(False, dtype, dtype))
            yield from by_rows(True, E4M3) if fp8 else ()
        case "choosing":
            yield from choosing()
            yield from _wide_and_half(before_a_head)
        case "attention":
            yield from _wide_and_half(lambda dtype: attending(dtype, dtype, fp8 and dtype == HALF))
            yield from attending(E4M3) if fp8 else ()
            if early.starts_early():
                yield from (*attending_early(HALF), *attending_early(E4M3))
        case "latents":
            yield from _wide_and_half(latents)
            yield from streamed_latents() if capability == HOPPER else ()
        case "compressed":
            yield from _wide_and_half(compressed_attention)
        case "delta":
            yield from _wide_and_half(lambda dtype: delta_nets(False, dtype))
            yield from delta_nets(True) if fp8 else ()
            yield from islice(delta_nets(False, state_dtype=torch.bfloat16), 3)
            yield from (*streamed_deltas(), *streamed_drafts(), *streamed_narrow()) if capability == HOPPER else ()
        case "products":
            yield from products()
            yield from fp8_products() if fp8 else widened_products()
        case "four_bit":
            yield from four_bit_products([*FOUR_BITS, NVFP4] if fp8 else FOUR_BITS)
            yield from streamed_four_bits() if capability == HOPPER else ()
        case "experts":
            yield from routes([Form.PLAIN, Form.BOTH] if fp8 else [Form.PLAIN])
            yield from experts([None, *FOUR_BITS, "fp8", *([NVFP4] if fp8 else [])])
        case "sums":
            yield from sums(False)
            yield from sums(True) if fp8 else ()
        case "stamped":
            yield from stamped()
        case "invariant":
            yield from _wide_and_half(in_one_order)


KERNELS = (
    "rows", "choosing", "attention", "latents", "compressed", "delta", "products", "four_bit", "experts", "sums",
    "stamped", "invariant",
)  # fmt: skip


def _told(error: BaseException) -> str:
    """What is at the bottom of it: a kernel calls others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[-300:]


class Builder:
    """Builds what is launched for one kind of card."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.built: list[Built] = []
        self.wrong: list[str] = []
        self._seen: list[Any] = []
        self._run = JITFunction.run

    def say(self, problem: str) -> None:
        self.wrong.append(problem)
        print(f"{self.capability}: {problem}", file=sys.stderr, flush=True)

    def build(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name, most = f"{kernel.__module__.rsplit('.', 1)[1]}.{kernel.__name__}", SHARED_MEMORY[self.capability]
        try:
            made = self._run(kernel, *args, grid=grid, warmup=True, **options)
            shared = made.metadata.shared
        except Exception as error:
            self.say(f"{name}: {_told(error)}")
            return None
        if not any(made is other for other in self._seen):
            self._seen.append(made)
            self.built.append(Built(name, shared))
            if shared > most:
                self.say(f"{name} takes {shared} bytes of shared memory, and there are {most}")
        return made

    @contextmanager
    def in_place_of_launches(self) -> Iterator[None]:
        """What wrappers ask the card, and the library's products, are answered here."""
        triton.runtime.driver.set_active(NoDriver(self.capability))
        for told in (early.starts_early, shared_memory.is_roomy, shared_memory.is_hopper):
            told.cache_clear()
        processors, linear, converts = stream.multiprocessors, F.linear, moe.converts_e4m3
        hopper = 132 if self.capability == HOPPER else 0
        streaming = (
            stream, expert_stream, expert_prompts, four_bit_stream, four_bit_persistent, delta_draft_stream,
            delta_stream,
        )  # fmt: skip
        for module in streaming:
            module.multiprocessors = lambda device: hopper
        moe.converts_e4m3 = lambda device: self.capability >= HAS_FP8
        F.linear = lambda x, weight, bias=None: x.new_empty(len(x), len(weight))
        setattr(JITFunction, "run", lambda *args, **options: self.build(*args, **options))  # noqa: B010
        try:
            yield
        finally:
            setattr(JITFunction, "run", self._run)  # noqa: B010
            for module in streaming:
                module.multiprocessors = processors
            F.linear, moe.converts_e4m3 = linear, converts


def build_for(capability: int, kernels: Sequence[str]) -> tuple[list[Built], list[str]]:
    """All kernels that were built, and what is wrong."""
    builder = Builder(capability)
    with builder.in_place_of_launches():
        for kernel in kernels:
            begun, before = time.monotonic(), len(builder.built)
            for case in cases(kernel, capability):
                case()
            took, made = time.monotonic() - begun, len(builder.built) - before
            print(f"{capability}: {kernel}, {made} built in {took:.0f} s", file=sys.stderr, flush=True)
    return builder.built, builder.wrong


def launched() -> set[str]:
    """All kernels that the sources launch."""
    found = set()
    for path in Path(early.__file__).parent.glob("*.py"):
        kernels = re.findall(r"jit(?:\(.*\))?\ndef (\w+)\(", text := path.read_text(encoding="utf-8"))
        found |= {f"{path.stem}.{name}" for name in kernels if re.search(rf"\b{name}\[", text)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, nargs="*", default=list(CARDS), choices=list(CARDS), metavar="80")
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=KERNELS, metavar="latents")
    parser.add_argument("--jobs", type=int, default=1, help="kinds of cards at the same time")
    asked = parser.parse_args()
    print("| capability | cards | kernels | built as | most shared memory | |\n|---|---|---|---|---|---|")
    failed, all_built = False, set()
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        results = pool.map(build_for, asked.target, [asked.kernel] * len(asked.target))
        for capability, (built, wrong) in zip(asked.target, results, strict=True):
            names, most = {each.name for each in built}, max((each.shared for each in built), default=0)
            state = "all build" if not wrong else f"{len(wrong)} do not"
            print(
                f"| {capability // 10}.{capability % 10} | {CARDS[capability]} | {len(names)} | {len(built)} "
                f"| {most // KIB} of {SHARED_MEMORY[capability] // KIB} KiB | {state} |",
                flush=True,
            )
            failed |= bool(wrong)
            all_built |= names
    if HOPPER in asked.target and set(asked.kernel) == set(KERNELS) and (missing := launched() - all_built):
        print(f"no case launches {', '.join(sorted(missing))}", file=sys.stderr)
        failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
