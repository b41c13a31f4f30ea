"""Kernels that take a row or a head at a time, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.language.extra import cuda

from phalanx.kernels.activation import sigmoid_and_mul_torch
from phalanx.kernels.cache import HeadNorms
from phalanx.kernels.fp8 import Activations, Form, InBoth, Quantised
from phalanx.kernels.gpu import rows, stamps
from phalanx.kernels.norm import add_rms_norm_torch
from phalanx.kernels.pairs import Unsummed, summed_torch
from phalanx.kernels.rotary import norm_heads, rotate_and_store_torch
from tests.kernels.interpreter import make_ready

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}


def close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < CLOSE[found.dtype], float(error)


def same(found: object, wanted: Quantised) -> None:
    assert isinstance(found, Quantised)
    for given, meant in zip(found, wanted, strict=True):
        assert torch.equal(given.float(), meant.float())


def check_norm(count: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, add: bool) -> None:
    """What comes in FP8, alone or beside the plain numbers, are the bits of these brought to FP8."""
    x, residual, weight = torch.randn(count, width).to(dtype), torch.randn(count, width).to(dtype), torch.randn(width)
    weight, kept = weight.to(weight_dtype), [residual.clone() if add else None for _ in Form]
    plain, in_fp8, both = (
        rows.add_rms_norm(x, each, weight, 1e-5, form) for each, form in zip(kept, Form, strict=True)
    )
    assert isinstance(plain, Tensor)
    assert isinstance(both, InBoth)
    assert plain.dtype is dtype
    wanted = add_rms_norm_torch(x.clone(), residual.clone() if add else None, weight, 1e-5)
    close(plain, wanted)
    assert dtype is torch.float32 or (plain == wanted).float().mean() > 0.99, "rounded once too often"
    assert torch.equal(both.plain, plain)
    same(both.in_fp8, rows.quantise(plain))
    same(in_fp8, rows.quantise(plain))
    for each in kept:
        assert each is None or torch.equal(each, residual + x)


def check_pairs(count: int, top: int, width: int, dtype: torch.dtype) -> None:
    """Summed up on the way into a norm they have the bits of a sum and a norm, in all forms."""
    pairs, residual = Unsummed(torch.randn(count * top, width).to(dtype), top), torch.randn(count, width).to(dtype)
    total, weight = rows.sum_pairs(pairs), torch.randn(width)
    assert torch.equal(total, summed_torch(pairs))
    gate = torch.randn(count, 1).to(dtype)
    assert torch.equal(rows.sum_pairs(pairs, residual), total + residual)
    close(rows.sum_pairs(pairs, residual, gate), total + residual * gate.sigmoid())
    for form in Form:
        kept, apart = residual.clone(), residual.clone()
        found, wanted = (rows.add_rms_norm(x, own, weight, 1e-5, form) for x, own in ((pairs, kept), (total, apart)))
        assert torch.equal(kept, apart)
        assert all(torch.equal(*pair) for pair in zip(flat(found), flat(wanted), strict=True))


def flat(given: Activations) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [each.float() for part in given for each in (part if isinstance(part, Quantised) else (part,))]


def check_gate(count: int, width: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(count, width).to(dtype), (torch.randn(count, width) * 5).to(dtype)
    product = rows.sigmoid_and_mul(x, gate)
    assert isinstance(product, Tensor)
    close(product, sigmoid_and_mul_torch(x, gate))
    same(rows.sigmoid_and_mul(x, gate, quantised=True), rows.quantise(product))


def check_heads(heads: int, kv_heads: int, head_dim: int, rotary: int, dtype: torch.dtype, norm: torch.dtype) -> None:
    """Normed over the whole head, turned in its first dimensions; values as they are."""
    qkv = torch.randn(3, heads + 2 * kv_heads, head_dim).to(dtype)
    cos, sin = (torch.randn(3, 1, rotary).to(dtype) for _ in range(2))
    norms = HeadNorms(torch.randn(head_dim).to(norm), torch.randn(head_dim).to(norm), 1e-6)
    write_to = torch.tensor([3, 0, 7])
    cache = torch.zeros(2, 4, 2, kv_heads, head_dim, dtype=dtype)
    twin, other = qkv.double(), cache.double()
    norm_heads(twin, heads, kv_heads, HeadNorms(norms.query.double(), norms.key.double(), 1e-6))
    rotate_and_store_torch(twin, cos.double(), sin.double(), write_to, other, heads, kv_heads)
    values = qkv[:, heads + kv_heads :].clone()
    rows.rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads, norms)
    assert torch.equal(qkv[:, heads + kv_heads :], values)
    close(qkv, twin)
    close(cache, other)
    assert torch.equal(cache.flatten(0, 1)[write_to], qkv[:, heads:].unflatten(1, (2, kv_heads)))


def check_stamp(count: int, top: int) -> None:
    """A norm that is to say when it begins computes the same bits, and the next one says nothing."""
    x, residual, weight = torch.randn(count * top, 140), torch.randn(count, 140), torch.randn(140)
    given, place = Unsummed(x, top) if top > 1 else x, torch.zeros(2, dtype=torch.int64)
    ticks = iter((7,))
    cuda.globaltimer = lambda: next(ticks)
    stamps.want(place)
    traced, untraced = (rows.add_rms_norm(given, residual.clone(), weight, 1e-5) for _ in range(2))
    assert isinstance(traced, Tensor)
    assert isinstance(untraced, Tensor)
    assert torch.equal(traced, untraced)
    assert place.tolist() == [7, 0]


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    half, wide = torch.float16, torch.float32  # the interpreter has no arithmetic of bfloat16
    for count, width in ((1, 256), (3, 77), (2, 300)):
        check_norm(count, width, half, half, add=True)
        check_norm(count, width, half, wide, add=False)
        check_gate(count, width, half)
    check_norm(2, 130, wide, wide, add=True)
    for top in (1, 4, 9):
        check_pairs(3, top, 140, half)
        check_stamp(3, top)
    check_gate(2, 1030, wide)
    check_heads(4, 2, 256, 64, half, wide)
    check_heads(3, 1, 36, 12, wide, wide)
    check_heads(9, 3, 64, 16, half, half)
    check_heads(6, 2, 32, 32, half, half)


if __name__ == "__main__":
    main()
