"""The C kernels as they are built for lesser processors than this one, which runs them too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.activation import sigmoid, silu_and_mul
from phalanx.kernels.attention import AttentionBatch, Sight, SightMasks, decode_attention
from phalanx.kernels.gemm import one_row, skinny_gemm
from phalanx.kernels.norm import add_rms_norm
from phalanx.kernels.panels import Panels, product
from phalanx.kernels.tiling import DecodeRows
from tests.kernels.test_panels import ROUNDING, make

KINDS = {"x86-64-v2": "sse4_2", "haswell": "avx2", "skylake-avx512": "avx512bw", "armv8-a": "asimd"}
"""As compilers name them, and what a processor says of itself that runs what is built for them."""
FACTS = Path("/proc/cpuinfo")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cpu.library() is None or not FACTS.exists(), reason="no C compiler here, or no word on the CPU"),
]


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ctypes.CDLL:
    kind: str = request.param
    if KINDS[kind] not in FACTS.read_text().split():
        pytest.skip(f"{kind} is not what this processor is")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_FLAGS", ("-O1", f"-march={kind}", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"))
    built = cpu.library.__wrapped__()
    assert built is not None
    return built


def test_they_compute_what_this_one_does(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rounding. Rows of a product have the same bits whatever rows are beside them."""
    works = [*small_ones(), *products(), attention(head_dim=64), attention(head_dim=36)]
    wanted = [work() for work in works]
    monkeypatch.setattr(cpu, "library", lambda: kernels)
    for work, ours in zip(works, wanted, strict=True):
        assert float((work() - ours).norm() / ours.norm()) < 5 * ROUNDING
    for panels in some_panels():
        x = torch.randn(31, panels.columns)
        alone = torch.cat([product(row[None], panels, None) for row in x])
        for count in (2, 3, 4, 5, 7, 12, 13, 31):
            assert torch.equal(product(x[:count], panels, None), alone[:count])


def small_ones() -> list[Callable[[], Tensor]]:
    x, weight, wide = torch.randn(5, 77), torch.randn(77), torch.randn(11, 77)
    return [
        lambda: sigmoid(x),
        lambda: silu_and_mul(torch.cat((x, x * 2), 1)),
        lambda: add_rms_norm(x, None, weight, 1e-5),
        lambda: skinny_gemm(x, wide, None),
        lambda: one_row(x[:1], wide, None),
    ]


def some_panels() -> list[Panels]:
    return [make(40, 200, bits, 32, torch.float16, minimums)[0] for bits in (4, 5, 8) for minimums in (False, True)]


def products() -> list[Callable[[], Tensor]]:
    x = torch.randn(31, 200)
    return [partial(product, x[:count], panels, None) for panels in some_panels() for count in (1, 3, 31)]


def attention(head_dim: int) -> Callable[[], Tensor]:
    """A prompt, and the last token of another sequence."""
    tables = torch.randperm(60, dtype=torch.int32).view(2, 30)
    cache, q = torch.randn(60, 16, 2, 2, head_dim), torch.randn(41, 6, head_dim)
    slots, positions = torch.tensor([0] * 40 + [1]), torch.tensor([*range(300, 340), 479])
    rows, sight = DecodeRows(tables, slots, positions), Sight(window=300)

    def attended() -> Tensor:
        masks, out = SightMasks(AttentionBatch(positions, rows, []), 16, torch.float32), torch.empty_like(q)
        decode_attention(q, cache, rows, masks, sight, head_dim**-0.5, out)
        return out

    return attended
