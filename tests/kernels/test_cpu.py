"""The C kernels compute what their torch definitions define, in float64 where torch can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.activation import sigmoid, silu_and_mul, silu_and_mul_torch
from phalanx.kernels.attention import (
    FEW_KEYS,
    AttentionBatch,
    PrefillRow,
    Sight,
    SightMasks,
    decode_attention,
    decode_attention_torch,
    paged_attention,
    prefill_attention_torch,
)
from phalanx.kernels.gemm import SKINNY, Gemm, one_row, skinny_gemm
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_torch
from phalanx.kernels.rotary import rotate_and_store, rotate_and_store_torch
from phalanx.kernels.sampling import likeliest
from phalanx.kernels.tiling import DecodeRows, PrefillTiles

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def close(found: Tensor, wanted: Tensor) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error < 1e-6, float(error)


def test_they_are_compiled_here() -> None:
    assert cpu.library() is not None


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 5), (40, 1024), (7, 77)])
def test_add_rms_norm(rows: int, width: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    total = (x + residual).double()
    wanted = add_rms_norm_torch(total, None, weight.double(), 1e-5)
    close(add_rms_norm(x, residual, weight, 1e-5), wanted)
    assert torch.equal(residual, total.float())
    close(add_rms_norm(x, None, weight, 1e-5), add_rms_norm_torch(x.double(), None, weight.double(), 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 3), (33, 130), (33, 1000)])
def test_silu_and_mul(rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 4
    gate_up[0, 0], gate_up[-1, 1] = 200.0, -200.0
    close(silu_and_mul(gate_up), silu_and_mul_torch(gate_up.double()))


@pytest.mark.parametrize("count", [1, 17, 640, 40_001])
def test_sigmoid(count: int) -> None:
    """Whatever stands before a number, it has the same bits."""
    x = torch.randn(count) * 6
    x[-1] = -200.0
    found = sigmoid(x)
    close(found, torch.sigmoid(x.double()))
    for start in (1, 7, count // 2):
        assert torch.equal(sigmoid(x[start:]), found[start:])


@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 1, 36, 36), (2, 2, 32, 16)])
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, rotary: int, tokens: int) -> None:
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    cos, sin = torch.randn(tokens, 1, rotary), torch.randn(tokens, 1, rotary)
    write_to = torch.randperm(4 * tokens)[:tokens]
    cache, twin = torch.zeros(tokens, 4, 2, kv_heads, head_dim), qkv.clone()
    other = cache.clone()
    rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads)
    rotate_and_store_torch(twin, cos, sin, write_to, other, heads, kv_heads)
    close(qkv, twin)
    close(cache, other)
    assert (cache.flatten(0, 1).abs().sum((1, 2, 3)) > 0).nonzero().flatten().tolist() == sorted(write_to.tolist())


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 36), (8, 8, 20), (6, 2, 128)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None) -> None:
    lengths = torch.tensor([0, 1, 15, 16, 17, 50])
    rows, width = len(lengths), 50 // block_size + 1
    cache = torch.randn(rows * width + 3, block_size, 2, kv_heads, head_dim)
    table = torch.randperm(len(cache))[: rows * width].view(rows, width)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim) * 3
    decode = DecodeRows(table.int(), torch.arange(rows), lengths)
    masks = SightMasks(AttentionBatch(lengths, decode, []), block_size, torch.float64)
    out, scale = poisoned(rows, heads, head_dim), head_dim**-0.5
    decode_attention(qkv[:, :heads], cache, decode, masks, Sight(window), scale, out)
    wanted = decode_attention_torch(qkv[:, :heads].double(), cache.double(), decode, masks.decode(Sight(window)), scale)
    close(out, wanted)


def test_attention_to_scores_that_fall_steeply() -> None:
    """Keys are looked at part by part, here every other one with scores of 160 less."""
    width = 320
    cache = torch.randn(width, 16, 2, 1, 16)
    cache[:, :, 0] = torch.where(torch.arange(16 * width) // 256 % 2 == 0, 10.0, 0.0).view(width, 16, 1, 1)
    decode = DecodeRows(torch.arange(width, dtype=torch.int32)[None], torch.tensor([0]), torch.tensor([5000]))
    masks, out = SightMasks(AttentionBatch(decode.positions, decode, []), 16, torch.float64), poisoned(1, 1, 16)
    q = torch.ones(1, 1, 16)
    decode_attention(q, cache, decode, masks, Sight(), 1.0, out)
    close(out, decode_attention_torch(q.double(), cache.double(), decode, masks.decode(Sight()), 1.0))


SIGHTS = [
    *(Sight(), Sight(window=7), Sight(window=300), Sight(sinks=torch.randn(6))),
    *(Sight(window=window, chunked=True) for window in (5, 64)),
]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("start", [0, 3, 250, 1023, 4090])
def test_rows_of_one_sequence_share_a_reading_of_its_keys(start: int, sight: Sight) -> None:
    """Beside rows of others, over the ends of blocks and of parts that threads share: the bits of each row alone."""
    heads, kv_heads, head_dim, block_size = 6, 2, 20, 16
    positions = torch.cat([torch.tensor([40]), torch.arange(start, start + 13), torch.tensor([7, 40])])
    slots = torch.tensor([0, *[1] * 13, 2, 3])
    tables = torch.randperm(4 * (width := 260)).view(4, width)
    cache = torch.randn(len(tables.flatten()), block_size, 2, kv_heads, head_dim)
    q = torch.randn(len(slots), heads, head_dim) * 3

    def attended(rows: slice) -> tuple[Tensor, Tensor]:
        decode = DecodeRows(tables.int(), slots[rows], positions[rows])
        masks = SightMasks(AttentionBatch(positions[rows], decode, []), block_size, torch.float64)
        out = poisoned(len(slots[rows]), heads, head_dim)
        decode_attention(q[rows], cache, decode, masks, sight, head_dim**-0.5, out)
        wanted = decode_attention_torch(
            q[rows].double(), cache.double(), decode, masks.decode(sight), head_dim**-0.5, sinks=sight.sinks
        )
        return out, wanted

    together, wanted = attended(slice(None))
    close(together, wanted)
    alone = torch.cat([attended(slice(row, row + 1))[0] for row in range(len(slots))])
    assert torch.equal(together, alone)
    last = start + 12
    cache[tables[1, last // block_size], last % block_size] = float("nan")  # no row before it may look there
    others = torch.arange(len(slots)) != 13
    assert torch.equal(attended(slice(None))[0][others], alone[others])


@pytest.mark.parametrize("window", [66, 129, 258])
def test_rows_on_both_sides_of_a_border_of_chunks(window: int) -> None:
    """What the last ones see begins behind what the first ones see."""
    sight, positions = Sight(window, chunked=True), torch.arange(window - 3, window + 1)
    tables = torch.arange(20, dtype=torch.int32)[None]
    cache, q = torch.randn(20, 16, 2, 1, 16), torch.randn(4, 1, 16)
    decode = DecodeRows(tables, torch.zeros(4, dtype=torch.int64), positions)
    masks, out = SightMasks(AttentionBatch(positions, decode, []), 16, torch.float64), poisoned(4, 1, 16)
    decode_attention(q, cache, decode, masks, sight, 0.25, out)
    close(out, decode_attention_torch(q.double(), cache.double(), decode, masks.decode(sight), 0.25))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 90), (250, 40), (FEW_KEYS - 9, 9), (FEW_KEYS - 9, 10)])
def test_a_prompt(start: int, count: int, sight: Sight) -> None:
    """Behind another one, alone and cut in two, with few keys and with more."""
    heads, kv_heads, head_dim, block_size = 6, 2, 20, 16
    tables = torch.randperm(2 * (width := FEW_KEYS // block_size + 1)).view(2, width)
    cache = torch.randn(2 * width, block_size, 2, kv_heads, head_dim)
    qkv = torch.randn(5 + count, heads + 2 * kv_heads, head_dim) * 3
    fresh = start + torch.arange(count)
    cache[tables[1, fresh // block_size], fresh % block_size] = qkv[5:, heads:].unflatten(1, (2, -1))

    def attended(*cut: PrefillRow) -> Tensor:
        few = start + count <= FEW_KEYS
        positions = torch.cat((torch.zeros(5, dtype=torch.int64), fresh))
        each = DecodeRows(tables.int(), (torch.arange(5 + count) >= 5).long(), positions) if few else None
        batch = AttentionBatch(torch.zeros(0, dtype=torch.int64), None, list(cut), each=each)
        masks = SightMasks(batch, block_size, torch.float32)
        return paged_attention(qkv, heads, cache, batch, masks, sight, head_dim**-0.5)[5:]

    tiles = PrefillTiles(tables, torch.tensor([[1, 5, count, start, 0]]), resumed=True)
    wanted = torch.empty(5 + count, heads, head_dim, dtype=torch.float64)
    prefill_attention_torch(qkv[:, :heads].double(), cache.double(), tiles, sight, head_dim**-0.5, wanted)
    half = count // 2
    close(attended(PrefillRow(5, count, start, tables[1])), wanted[5:])
    close(
        attended(PrefillRow(5, half, start, tables[1]), PrefillRow(5 + half, count - half, start + half, tables[1])),
        wanted[5:],
    )


@pytest.mark.parametrize("rows", SKINNY)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (3, 5), (130, 7), (64, 1)])
def test_skinny_gemm(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    close(skinny_gemm(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))
    close(skinny_gemm(x, weight, None), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (3, 5), (130, 7), (64, 1)])
def test_one_row(inputs: int, outputs: int) -> None:
    x, bias = torch.randn(1, inputs), torch.randn(outputs)
    weight = torch.randn(outputs, inputs + 3)[:, :inputs]
    close(one_row(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))
    close(one_row(x, weight, None), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
@pytest.mark.parametrize("packed", [True, False])
def test_a_product_is_the_same_whichever_kernel_runs_it(rows: int, packed: bool) -> None:
    product = Gemm(torch.randn(96, 144), torch.randn(96))
    if packed:
        product.pack()
    x = torch.randn(rows, 144)
    assert product.bias is not None
    close(product(x), F.linear(x.double(), product.weight.double(), product.bias.double()))


@pytest.mark.parametrize("width", [1, 3, 4, 63, 1000])
def test_likeliest(width: int) -> None:
    scores = torch.randn(9, width)
    assert likeliest(scores).tolist() == scores.argmax(-1).tolist()
    at = width // 2
    scores[0], scores[1], scores[2, at], scores[3, at], scores[4, at] = 1.0, -torch.inf, torch.inf, torch.nan, 9.0
    scores[4, -1] = 9.0
    assert likeliest(scores)[:5].tolist() == [0, 0, at, at, at]


def test_without_a_compiler_torch_does_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    by_c = add_rms_norm(x, None, weight, 1e-5)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cpu.library.cache_clear()
    try:
        assert cpu.library() is None
        assert not cpu.runs(x)
        close(add_rms_norm(x, None, weight, 1e-5), by_c)
    finally:
        monkeypatch.undo()
        cpu.library.cache_clear()


def test_a_compiler_that_fails_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    cpu.library.cache_clear()
    try:
        assert cpu.library() is None
        assert list(tmp_path.rglob("*.so")) == []
    finally:
        monkeypatch.undo()
        cpu.library.cache_clear()


def test_ranks_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, calls, sources = tmp_path / "cc", tmp_path / "calls", [tmp_path / "a.c", tmp_path / "b.c"]
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o700)
    names = list(cpu._SIGNATURES)
    for source, part in zip(sources, (names[:3], names[3:]), strict=True):
        source.write_text("\n".join(f"void {name}(void) {{}}" for name in part))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(cpu, "_SOURCES", sources)
    with ThreadPoolExecutor(3) as ranks:
        made = [ranks.submit(cpu.library.__wrapped__) for _ in range(3)]
    assert all(each.result() is not None for each in made)
    assert len(calls.read_text().splitlines()) == len(sources) + 1
    assert len(list(tmp_path.rglob("*.so"))) == 1
