"""The Triton kernels compute what their torch definitions define. Run with `pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import (
    sigmoid_and_mul,
    sigmoid_and_mul_quantised,
    sigmoid_and_mul_torch,
    silu_and_mul,
    silu_and_mul_quantised,
    silu_and_mul_torch,
)
from phalanx.kernels.attention import (
    AttentionBatch,
    PrefillRow,
    Sight,
    SightMasks,
    decode_attention,
    decode_attention_torch,
    paged_attention,
    paged_attention_quantised,
)
from phalanx.kernels.cache import HeadNorms
from phalanx.kernels.fp8 import (
    Activations,
    Form,
    Fp8Weight,
    InBoth,
    Quantised,
    dequantise,
    quantise_blocks,
    row_block_of,
)
from phalanx.kernels.gemm import Fp8Gemm, Gemm, fp8_product_torch
from phalanx.kernels.moe import ExpertWeights, fused_experts, fused_experts_torch, route, route_torch, summed
from phalanx.kernels.norm import (
    add_rms_norm,
    add_rms_norm_both,
    add_rms_norm_in,
    add_rms_norm_quantised,
    add_rms_norm_torch,
)
from phalanx.kernels.pairs import Unsummed, summed_torch
from phalanx.kernels.quantise import quantise, quantise_torch
from phalanx.kernels.rotary import norm_heads, rotate_and_store, rotate_and_store_torch
from phalanx.kernels.sampling import likeliest
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from phalanx.spec.ffn import SILU, Router

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error < (tolerance or TOLERANCE[found.dtype]), float(error)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 5), (300, 1024), (7, 77)])
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    total = x + residual
    found = add_rms_norm(x, residual, weight, 1e-5)
    close(found, add_rms_norm_torch(total.double(), None, weight.double(), 1e-5))
    close(residual, total)


@DTYPES
def test_add_rms_norm_of_heads_that_lie_apart(dtype: torch.dtype) -> None:
    heads, weight = randn(5, 12, 64, dtype=dtype)[:, 3:7], randn(64, dtype=dtype)
    close(add_rms_norm(heads, None, weight, 1e-6), add_rms_norm_torch(heads.double(), None, weight.double(), 1e-6))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (5, 3), (33, 1300)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    close(silu_and_mul(gate_up), silu_and_mul_torch(gate_up.double()))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 3), (33, 1300)])
def test_sigmoid_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    x, gate = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype) * 4
    close(sigmoid_and_mul(x, gate), sigmoid_and_mul_torch(x.double(), gate.double()))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 1, 36, 36), (2, 2, 32, 16)])
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, rotary: int, dtype: torch.dtype) -> None:
    qkv = randn(5, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cos, sin = randn(5, 1, rotary, dtype=dtype), randn(5, 1, rotary, dtype=dtype)
    write_to = torch.tensor([3, 0, 17, 9, 23], device="cuda")
    cache = torch.zeros(6, 4, 2, kv_heads, head_dim, dtype=dtype, device="cuda")
    twin, other = qkv.double(), cache.double()
    rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads)
    rotate_and_store_torch(twin, cos.double(), sin.double(), write_to, other, heads, kv_heads)
    close(qkv, twin)
    close(cache, other)


@DTYPES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"), [(6, 2, 128, 128), (16, 2, 256, 64), (3, 1, 36, 12), (9, 3, 64, 16)]
)
def test_heads_are_normed_before_they_are_rotated(
    heads: int, kv_heads: int, head_dim: int, rotary: int, tokens: int, wide: bool, dtype: torch.dtype
) -> None:
    """Over the whole head, however much of it is rotated, by weights that may be float32."""
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cos, sin = randn(tokens, 1, rotary, dtype=dtype), randn(tokens, 1, rotary, dtype=dtype)
    of = torch.float32 if wide else dtype
    norms = HeadNorms(randn(head_dim, dtype=of), randn(head_dim, dtype=of), 1e-6)
    write_to = torch.randperm(80, device="cuda")[:tokens]
    cache = torch.zeros(20, 4, 2, kv_heads, head_dim, dtype=dtype, device="cuda")
    twin, other = qkv.double().cpu(), cache.double().cpu()
    norm_heads(twin, heads, kv_heads, HeadNorms(norms.query.double().cpu(), norms.key.double().cpu(), 1e-6))
    rotate_and_store_torch(twin, cos.double().cpu(), sin.double().cpu(), write_to.cpu(), other, heads, kv_heads)
    rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads, norms)
    close(qkv, twin.cuda())
    close(cache, other.cuda())


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 36), (32, 8, 128), (6, 6, 18)])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 15, 16, 17, 63, 64, 700], device="cuda")
    rows, width = len(positions), 700 // 16 + 1
    cache = randn(rows * width + 3, 16, 2, kv_heads, head_dim, dtype=dtype)
    table = torch.randperm(len(cache), device="cuda")[: rows * width].view(rows, width)
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    decode = DecodeRows(table.int(), torch.randperm(rows, device="cuda"), positions)
    masks = SightMasks(AttentionBatch(positions, decode, []), 16, torch.float64)
    out, scale = torch.full((rows, heads, head_dim), float("nan"), dtype=dtype, device="cuda"), head_dim**-0.5
    decode_attention(qkv[:, :heads], cache, decode, masks, Sight(window), scale, out)
    wanted = decode_attention_torch(qkv[:, :heads].double(), cache.double(), decode, masks.decode(Sight(window)), scale)
    close(out, wanted)


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1, 3), (7, 5000), (1030, 96), (4101, 2880), (7, 3100)])
def test_matrix_vector(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    product = Gemm(randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype))
    x = randn(1, inputs, dtype=dtype)
    assert product.bias is not None
    close(product(x), F.linear(x.double(), product.weight.double(), product.bias.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 8, 9, 33, 64, 65, 128, 129, 250])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4096, 4096), (4096, 1000), (1000, 3000), (1, 8), (200, 40000), (1030, 96), (7, 1001), (9000, 1000)],
)
def test_products_of_few_rows(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Split over the inputs or not, tiles cut short on every side, and inputs that no bulk copy takes."""
    product = Gemm(randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype))
    x = randn(rows, inputs, dtype=dtype)
    assert product.bias is not None
    wanted = F.linear(x.double(), product.weight.double(), product.bias.double())
    for _ in range(3):
        close(product(x), wanted, 1e-2)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [4, 32, 60, 100])
def test_products_wait_for_what_the_kernel_ahead_writes(rows: int, fp8: bool) -> None:
    """Norms and products in a graph, each launched before the one ahead has ended: the same as one after the other."""
    sizes = [(2560, 2048), (2048, 2560), (14336, 2048), (2048, 14336)] * 4
    norms = [torch.ones(inputs, dtype=torch.bfloat16, device="cuda") for _, inputs in sizes]
    products: list[Gemm | Fp8Gemm] = [
        Fp8Gemm(fp8_weight([outputs], inputs), None, torch.bfloat16)
        if fp8
        else Gemm(randn(outputs, inputs, dtype=torch.bfloat16))
        for outputs, inputs in sizes
    ]
    start = randn(rows, 2048, dtype=torch.bfloat16)

    def run(wait: bool) -> Tensor:
        x = start
        for norm, product in zip(norms, products, strict=True):
            x = product(add_rms_norm(x, None, norm, 1e-5))
            if wait:
                torch.cuda.synchronize()
        return x

    wanted = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(wait=False)
    for _ in range(5):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 5, 32, 64, 65, 128])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("uneven", [False, True])
def test_decode_attention_of_few_and_of_many_sequences(rows: int, kv_heads: int, uneven: bool) -> None:
    """Of all lengths, so few that each is split over its tokens and so many that none is, if they are not uneven."""
    heads, head_dim, width = 32, 128, 300
    positions = torch.randint(0, width * 16, (rows,), device="cuda")
    cache = randn(rows * width + 3, 16, 2, kv_heads, head_dim, dtype=torch.bfloat16)
    table = torch.randperm(len(cache), device="cuda")[: rows * width].view(rows, width)
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
    decode = DecodeRows(table.int(), torch.randperm(rows, device="cuda"), positions, uneven)
    masks = SightMasks(AttentionBatch(positions, decode, []), 16, torch.float32)
    out = torch.full((rows, heads, head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
    decode_attention(qkv[:, :heads], cache, decode, masks, Sight(), 0.1, out)
    close(out, decode_attention_torch(qkv[:, :heads].float(), cache.float(), decode, masks.decode(Sight()), 0.1))


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page"), [(8, 2, 128, 16), (9, 3, 64, 8), (4, 1, 36, 16)])
@pytest.mark.parametrize("resumed", [True, False])
def test_prefill_attention(
    heads: int, kv_heads: int, head_dim: int, page: int, window: int | None, dtype: torch.dtype, resumed: bool
) -> None:
    """Prompts from their start, chunks of longer ones, one that ends a tile early, and a tile of no rows."""
    spans = [(70 if resumed else 0, 130), (0, 300), (513 if resumed else 0, 128), (0, 2), (31 if resumed else 0, 129)]
    width, tokens = 700 // page + 1, sum(count for _, count in spans)
    cache = randn(len(spans) * width + 3, page, 2, kv_heads, head_dim, dtype=dtype)
    tables = torch.randperm(len(cache), device="cuda")[: len(spans) * width].view(len(spans), width)
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    rows, tiles, first = [], [(0, 0, 0, 0, 0)], 0
    for sequence, (start, count) in enumerate(spans):
        positions = torch.arange(start, start + count, device="cuda")
        places = tables[sequence, positions // page] * page + positions % page
        cache.flatten(0, 1)[places] = qkv[first : first + count, heads:].unflatten(1, (2, kv_heads))
        rows.append(PrefillRow(first, count, start, tables[sequence, : -(-(start + count) // page)]))
        tiles += tile_prompt(sequence, first, count, start)
        first += count
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32, device="cuda"), resumed)
    fast = AttentionBatch(tables, None, [], cut)
    plain = AttentionBatch(tables, None, rows)
    masks = SightMasks(plain, page, torch.float64)
    wanted = paged_attention(qkv.double(), heads, cache.double(), plain, masks, Sight(window), head_dim**-0.5)
    close(paged_attention(qkv, heads, cache, fast, masks, Sight(window), head_dim**-0.5), wanted)


@DTYPES
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_beside_one_that_broke(head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    counts = (130, 300, 20)
    tables = torch.arange(60, device="cuda").view(3, 20)
    cache, qkv = randn(60, 16, 2, 2, head_dim, dtype=dtype), randn(450, 12, head_dim, dtype=dtype)
    tiles = [*tile_prompt(0, 0, 130, 0), *tile_prompt(1, 130, 300, 0), *tile_prompt(2, 430, 20, 0)]
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32, device="cuda"), False)
    batch = AttentionBatch(tables, None, [], cut)
    masks = SightMasks(batch, 16, torch.float64)
    for broken in range(3):
        place = slice(sum(counts[:broken]), sum(counts[: broken + 1]))
        spoilt = qkv.clone()
        spoilt[place] = float("nan")
        found, wanted = (
            paged_attention(rows, 8, cache, batch, masks, Sight(window), head_dim**-0.5).flatten(1)
            for rows in (spoilt, qkv)
        )
        assert found[place].isnan().all()
        found[place] = wanted[place]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("rows", "count"), [(1, 0), (5, 200), (200, 0), (0, 130)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (6, 2)])
def test_attention_may_leave_in_fp8(heads: int, kv_heads: int, rows: int, count: int) -> None:
    """With the bits of what it is otherwise brought to: single tokens in parts or not, and a prompt behind them."""
    width, tokens = 20, rows + count
    cache = randn((rows + 1) * width, 16, 2, kv_heads, 128)
    tables = torch.randperm(len(cache), device="cuda").view(rows + 1, width).int()
    qkv, positions = randn(tokens, heads + 2 * kv_heads, 128), torch.randint(0, width * 16, (rows,), device="cuda")
    decode = DecodeRows(tables, torch.arange(rows, device="cuda"), positions) if rows else None
    tiles = torch.tensor(tile_prompt(rows, rows, count, 0), dtype=torch.int32, device="cuda")
    batch = AttentionBatch(positions, decode, [], PrefillTiles(tables, tiles, True) if count else None)
    masks = SightMasks(batch, 16, torch.bfloat16)
    attended = paged_attention(qkv, heads, cache, batch, masks, Sight(), 0.1)
    found = paged_attention_quantised(qkv, heads, cache, batch, masks, Sight(), 0.1)
    for given, wanted in zip(found, quantise(attended.flatten(1)), strict=True):
        assert torch.equal(given.float(), wanted.float())


def close_quantised(found: Quantised, wanted: Tensor) -> None:
    """The same scales, and values that differ at most where rounding may go either way."""
    reference = quantise_torch(wanted)
    close(found.scales.bfloat16(), reference.scales)
    values = dequantise(found.values, found.scales, 1, torch.bfloat16)
    close(values, dequantise(reference.values, reference.scales, 1, torch.float32))


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 5), (300, 1000), (7, 77), (9, 2048)])
def test_quantised_rows(rows: int, width: int) -> None:
    x, residual, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((rows, width), (rows, width), (width,)))
    close_quantised(quantise(x), x)
    total, gate_up = x + residual, randn(rows, 2 * width, dtype=torch.bfloat16)
    close_quantised(add_rms_norm_quantised(x, residual, weight, 1e-5), add_rms_norm_torch(total, None, weight, 1e-5))
    close(residual, total)
    close_quantised(silu_and_mul_quantised(gate_up), silu_and_mul_torch(gate_up.clone()))
    close_quantised(sigmoid_and_mul_quantised(x, residual), sigmoid_and_mul_torch(x, residual))


@DTYPES
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (1, 4096), (3, 5), (300, 1000), (7, 77)])
def test_a_norm_in_both_forms_has_the_bits_of_each(rows: int, width: int, add: bool, dtype: torch.dtype) -> None:
    """Those of the norm alone, and of the same brought to FP8 by a kernel of its own or on the way out of its norm."""
    x, residual, weight = randn(rows, width), randn(rows, width), randn(width, dtype=dtype)
    twins = [residual.clone() if add else None for _ in range(3)]
    both, plain = add_rms_norm_both(x, twins[0], weight, 1e-5), add_rms_norm(x, twins[1], weight, 1e-5)
    in_fp8 = add_rms_norm_quantised(x, twins[2], weight, 1e-5)
    assert torch.equal(both.plain, plain)
    for found, alone, wanted in zip(both.in_fp8, in_fp8, quantise(plain), strict=True):
        assert torch.equal(found.float(), wanted.float())
        assert torch.equal(alone.float(), wanted.float())
    for twin in twins:
        assert twin is None or torch.equal(twin, residual + x)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(
    ("rows", "top", "width"), [(1, 9, 2048), (3, 1, 77), (7, 4, 2880), (300, 8, 1000), (2, 9, 7168)]
)
def test_pairs_are_summed_up_on_the_way_into_a_norm(rows: int, top: int, width: int, form: Form) -> None:
    """With the bits of a sum and a norm, one after the other."""
    pairs, residual, weight = Unsummed(randn(rows * top, width), top), randn(rows, width), randn(width)
    total, kept, apart = summed(pairs), residual.clone(), residual.clone()
    assert torch.equal(total, summed_torch(pairs))
    gate = randn(rows, 1)
    assert torch.equal(summed(pairs, residual), total + residual)
    close(summed(pairs, residual, gate), total + residual * gate.sigmoid())
    found = add_rms_norm_in(form, pairs, kept, weight, 1e-5)
    wanted = add_rms_norm_in(form, total, apart, weight, 1e-5)
    assert torch.equal(kept, apart)
    for given, meant in zip(tensors_of(found), tensors_of(wanted), strict=True):
        assert torch.equal(given.float(), meant.float())


def tensors_of(given: Activations) -> tuple[Tensor, ...]:
    if isinstance(given, InBoth):
        return given.plain, *given.in_fp8
    return (given,) if isinstance(given, Tensor) else tuple(given)


def fp8_weight(parts: list[int], inputs: int) -> Fp8Weight:
    weight = Fp8Weight.empty(sum(parts), inputs, row_block=row_block_of(parts), device=torch.device("cuda"))
    for part, rows in zip(weight.split(parts), parts, strict=True):
        part.fill(*quantise_blocks(torch.randn(rows, inputs, device="cuda")))
    return weight


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 50, 64, 100, 130, 600])
@pytest.mark.parametrize(
    ("parts", "inputs"),
    [
        ([512, 128, 128], 4096),
        ([600, 600], 200),
        ([57 * 128], 1024),
        ([3], 5),
        ([2048], 768),
        ([320], 33008),
        ([256], 2432),
        ([2048, 64], 512),
    ],
)
def test_products_in_fp8(rows: int, parts: list[int], inputs: int) -> None:
    """Whole tiles, tiles cut short where projections are stacked, and shares of 57 tiles."""
    weight, bias = fp8_weight(parts, inputs), randn(sum(parts), dtype=torch.bfloat16)
    x = randn(rows, inputs, dtype=torch.bfloat16)
    wanted = fp8_product_torch(quantise(x), weight, None, torch.float64)
    for _ in range(3):
        close(Fp8Gemm(weight, None, torch.bfloat16)(x), wanted)
        close(Fp8Gemm(weight, bias, torch.bfloat16)(x), wanted + bias.double())
    exact = F.linear(x.double(), weight.dequantised(torch.float64))
    close(Fp8Gemm(weight, None, torch.float32)(x.float()), exact)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(511, 64, 2048), (512, 64, 2048), (777, 257, 1000)])
def test_many_rows_by_a_weight_in_float32(rows: int, outputs: int, inputs: int) -> None:
    """As routers have them. Tensor cores cut off what is behind the last places of a long sum."""
    x, weight, bias = (
        randn(rows, inputs),
        randn(outputs, inputs, dtype=torch.float32),
        randn(outputs, dtype=torch.float32),
    )
    wanted = F.linear(x.double(), weight.double(), bias.double())
    found = Gemm(weight, bias)(x)
    assert found.dtype == torch.float32
    close(found, wanted, tolerance=2e-5)


@pytest.mark.parametrize("rows", [1, 17, 64, 100, 300])
@pytest.mark.parametrize(("parts", "inputs"), [([512, 128, 128], 4096), ([600, 600], 200), ([3], 5)])
def test_fp8_weights_are_widened_in_the_product(
    rows: int, parts: list[int], inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on cards that do not convert e4m3: x stays as it is. Experts too."""
    from phalanx.kernels import gemm
    from phalanx.kernels.gpu import moe

    for module in (gemm, moe):
        monkeypatch.setattr(module, "converts_e4m3", lambda device: False)
    weight, bias, x = fp8_weight(parts, inputs), randn(sum(parts)), randn(rows, inputs)
    exact = F.linear(x.double(), weight.dequantised(torch.float64), bias.double())
    close(Fp8Gemm(weight, bias, torch.bfloat16)(x), exact)
    gate_up, down = (Fp8Weight.empty(4, *each, row_block=128, device=x.device) for each in ((512, 256), (256, 256)))
    for expert in range(4):
        gate_up[expert].fill(*quantise_blocks(torch.randn(512, 256, device="cuda") / 8))
        down[expert].fill(*quantise_blocks(torch.randn(256, 256, device="cuda") / 8))
    x, held = randn(rows, 256), ExpertWeights(gate_up, down)
    weights, chosen = route(randn(rows, 4), Router(4, 2, renormalise=True))
    on_cpu = ExpertWeights(*(each.dequantised(torch.float32).cpu() for each in (gate_up, down)))
    wanted = fused_experts_torch(x.float().cpu(), on_cpu, weights.float().cpu(), chosen.cpu(), SILU, False)
    close(fused_experts(x, held, weights, chosen).cpu(), wanted)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 128256), (3, 5), (200, 4097), (7, 8192)])
def test_likeliest(rows: int, width: int, dtype: torch.dtype) -> None:
    """In half precision scores are often equal: the first one is taken."""
    scores = randn(rows, width, dtype=dtype)
    wanted = [row.index(max(row)) for row in scores.tolist()]
    assert likeliest(scores).tolist() == wanted


@DTYPES
@pytest.mark.parametrize(("experts", "top"), [(128, 8), (4, 2), (60, 4), (5, 1)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(experts: int, top: int, renormalise: bool, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(experts, device="cuda") for _ in range(33)]).to(dtype) / experts * 4
    weights, chosen = route(logits, Router(experts, top, renormalise=renormalise))
    wanted, best = route_torch(logits.double(), Router(experts, top, renormalise=renormalise))
    assert chosen.tolist() == best.tolist()
    close(weights, wanted)


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 128, 700])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "inner"), [(16, 4, 256, 128), (5, 2, 144, 48), (128, 8, 128, 256)]
)
def test_fused_experts(rows: int, experts: int, top: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    x = randn(rows, hidden, dtype=dtype)
    gate_up, down = randn(experts, 2 * inner, hidden, dtype=dtype) / 8, randn(experts, hidden, inner, dtype=dtype) / 8
    weights, chosen = route(randn(rows, experts, dtype=dtype), Router(experts, top, renormalise=True))
    wanted = fused_experts_torch(
        x.double(), ExpertWeights(gate_up.double(), down.double()), weights.double(), chosen.long(), SILU, False
    )
    close(fused_experts(x, ExpertWeights(gate_up, down), weights, chosen), wanted)


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 128, 700])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "inner"), [(16, 4, 256, 128), (5, 2, 144, 48), (128, 8, 128, 256)]
)
def test_fused_experts_in_fp8(rows: int, experts: int, top: int, hidden: int, inner: int) -> None:
    """By the definition: experts one after the other, each product in FP8.

    What lies between the products is rounded to FP8: where it rounds the other way, it moves by a whole step.
    """
    device = torch.device("cuda")
    gate_up = Fp8Weight.empty(experts, 2 * inner, hidden, row_block=row_block_of([inner, inner]), device=device)
    down = Fp8Weight.empty(experts, hidden, inner, row_block=128, device=device)
    for expert in range(experts):
        for part in gate_up[expert].split([inner, inner]):
            part.fill(*quantise_blocks(torch.randn(inner, hidden, device="cuda") / 8))
        down[expert].fill(*quantise_blocks(torch.randn(hidden, inner, device="cuda") / 8))
    x = randn(rows, hidden, dtype=torch.bfloat16)
    weights, chosen = route(randn(rows, experts, dtype=torch.bfloat16), Router(experts, top, renormalise=True))
    wanted = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
    for expert in range(experts):
        entered = fp8_product_torch(quantise(x), gate_up[expert], None, torch.float64).bfloat16()
        left = fp8_product_torch(silu_and_mul_quantised(entered), down[expert], None, torch.float64)
        wanted += left * (weights * (chosen == expert)).sum(-1, keepdim=True)
    held = ExpertWeights(gate_up, down)
    assert held.takes_fp8(torch.bfloat16)
    found = fused_experts(x, held, weights, chosen)
    close(found, wanted, tolerance=3e-2)
    assert torch.equal(fused_experts(InBoth(x, quantise(x)), held, weights, chosen), found)


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """Places beyond 32 bits: the last blocks of a 4.6 GB cache."""
    blocks, rows, heads, kv_heads, head_dim = 70_000, 3, 16, 8, 128
    cache = torch.zeros(blocks, 16, 2, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
    cos, sin = torch.ones(rows, 1, head_dim, device="cuda"), torch.zeros(rows, 1, head_dim, device="cuda")
    table = torch.arange(blocks - rows, blocks, device="cuda")[:, None]
    rotate_and_store(qkv, cos.bfloat16(), sin.bfloat16(), table[:, 0] * 16, cache, heads, kv_heads)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    decode = DecodeRows(table.int(), torch.arange(rows, device="cuda"), positions)
    out = torch.empty(rows, heads, head_dim, device="cuda").bfloat16()
    masks = SightMasks(AttentionBatch(positions, decode, []), 16, torch.bfloat16)
    decode_attention(qkv[:, :heads], cache, decode, masks, Sight(), 1.0, out)
    close(out, qkv[:, heads + kv_heads :].repeat_interleave(2, dim=1))
