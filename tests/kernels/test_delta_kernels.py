"""Gated delta nets by the GPU's kernels are what they are defined to be."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.kernels.delta_weights import DeltaWeights
from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_the_kernels_compute_nets_as_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_delta")


@pytest.mark.slow
def test_the_kernel_that_streams_states_computes_nets_as_defined() -> None:
    """In Triton's interpreter, which has been told of Gluon."""
    run_apart("interpreted_delta_stream")


@pytest.mark.slow
def test_the_kernel_that_streams_states_of_drafts_computes_nets_as_defined() -> None:
    """In Triton's interpreter, which has been told of Gluon."""
    run_apart("interpreted_delta_drafts")


@pytest.mark.slow
def test_the_installed_triton_builds_the_kernels_that_stream_states(tmp_path: Path) -> None:
    """Gluon changes its names from version to version."""
    run_apart("compiled_delta_stream", interpret=False, TRITON_CACHE_DIR=str(tmp_path))


def test_states_are_streamed_where_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import delta_stream

    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))

    def is_streamed(dim: int = 128, kernel: int = 4, processors: int = 132) -> bool:
        monkeypatch.setattr(delta_stream, "multiprocessors", lambda device: processors)
        heads = torch.zeros(32)
        net = DeltaWeights(16, 32, dim, dim, torch.empty(64 * dim, kernel), heads, heads, torch.empty(dim), 1e-6)
        return delta_stream.is_streamed(net, on_gpu)

    assert is_streamed()
    assert not is_streamed(dim=64)
    assert not is_streamed(kernel=3)
    assert not is_streamed(processors=0)


def test_copies_of_states_leave_room_for_updates() -> None:
    """Rows of a state at once and how many such copies, beside 8, 16 and 32 updates, of states in 32 and 16 bits."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.delta_stream import copies_of

    assert [copies_of(*each) for each in ((8, 4), (16, 4), (32, 4), (8, 2), (16, 2), (32, 2))] == [
        (64, 2), (64, 2), (32, 2), (128, 2), (128, 2), (64, 2),
    ]  # fmt: skip


def test_drafts_of_few_tokens_are_streamed_where_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import delta_draft_stream

    def is_streamed(
        most: int, updates: int = 8, dim: int = 128, kernel: int = 4, processors: int = 132, size: int = 4
    ) -> bool:
        on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), element_size=lambda: size)
        monkeypatch.setattr(delta_draft_stream, "multiprocessors", lambda device: processors)
        heads = torch.zeros(32)
        net = DeltaWeights(16, 32, dim, dim, torch.empty(64 * dim, kernel), heads, heads, torch.empty(dim), 1e-6)
        return delta_draft_stream.is_streamed(net, most, updates, on_gpu)

    assert [is_streamed(most) for most in (1, 2, 3, 4, 5)] == [False, True, True, True, False]
    assert [is_streamed(4, updates) for updates in (10, 16, 17)] == [True, True, False]
    assert [is_streamed(4, updates, size=2) for updates in (17, 32, 33)] == [True, True, False]
    assert not is_streamed(4, dim=64)
    assert not is_streamed(4, kernel=3)
    assert not is_streamed(4, processors=0)


CASES = [
    (torch.float32, False, 2e-4),
    (torch.bfloat16, False, 4e-2),
    (torch.bfloat16, True, 4e-2),
]


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize("v_heads", [16, 32, 48])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nets_of_real_size_on_a_gpu(dtype: torch.dtype, quantised: bool, atol: float, v_heads: int) -> None:
    """Rows alone and many at once, prompts around the borders of chunks and tiles, then both beside each other."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    nets = Nets(random_net((16, v_heads), (128, 128), 4, dtype, "cuda"), 130)
    nets.check([(5, 0, 1000)], atol, quantised)
    nets.check([(5, 1000, 1)], atol, quantised)
    nets.alike = True
    nets.check([(6, 0, 200)], 4 * atol, quantised)
    nets.alike = False
    nets.check([(0, 0, 2), (1, 0, 63), (2, 0, 64), (3, 0, 65), (4, 0, 129)], atol, quantised)
    nets.check([(place, 0, 1) for place in range(32, 35)], atol, quantised)
    nets.check([(7, 0, 1), (nets.spare, 0, 1), (1, 63, 1), (0, 2, 4), (2, 64, 300), (5, 1001, 128)], atol, quantised)
    for rows, steps in ((32, 17), (128, 3)):
        for position in range(steps):
            nets.check([(place, position, 1) for place in range(rows)], atol, quantised)


@pytest.mark.parametrize("v_heads", [16, 32, 48])
@pytest.mark.parametrize("most", [1, 4, 9])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_states_in_bf16_on_a_gpu(most: int, v_heads: int) -> None:
    """Prompts, rows alone and many at once, and drafts, by every kernel that reads states."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    net = random_net((16, v_heads), (128, 128), 4, torch.float32, "cuda")
    nets = Nets(net, 40, most=most, state_dtype=torch.bfloat16)
    nets.check([(5, 0, 300), (6, 0, 65)], 2e-4)
    nets.check([(5, 300, 1), (nets.spare, 0, 1), (6, 65, 129)], 2e-4)
    for step in range(9):
        nets.check([(3, step, 1), (4, step, 1)], 2e-4)
        nets.check([(place, step, most) for place in range(7, 40)], 2e-4)
        nets.check([(place, step + 1, 1) for place in range(7, 40)], 2e-4)


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_updates_that_stay_pending_behind_a_few_drafts_on_a_gpu(most: int) -> None:
    """There is room for more than those of two steps."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    nets = Nets(random_net((16, 32), (128, 128), 4, torch.bfloat16, "cuda"), 9, most=most)
    for step in range(20):
        spans = [(place, step * (1 + place % most), 1 + (place + step) % most) for place in range(9)]
        nets.check([(place, start, max(1 + place % most, count)) for place, start, count in spans], 4e-2)


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize("v_heads", [16, 32, 48])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_of_drafts_of_nets_of_real_size_on_a_gpu(
    dtype: torch.dtype, quantised: bool, atol: float, v_heads: int
) -> None:
    """One to nine rows of a sequence, which goes on behind any of them, beside prompts, and rows that fill up."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    nets = Nets(random_net((16, v_heads), (128, 128), 4, dtype, "cuda"), 40, most=9)
    filling = (nets.spare, 0, 1)
    nets.check([(3, 0, 1), filling, filling, (2, 0, 9), (0, 0, 4), (1, 0, 10), (4, 0, 300)], atol, quantised)
    nets.check([(3, 1, 4), filling, (2, 4, 9), (0, 3, 2), (1, 10, 1), (4, 300, 6), filling], atol, quantised)
    nets.check([(3, 3, 7), (2, 13, 1), (4, 301, 65), (1, 11, 20)], atol, quantised)
    nets.check([(3, 4, 1), (1, 31, 2), (2, 14, 8), (4, 366, 1), filling, (0, 0, 5)], atol, quantised)
    for step in range(4):
        nets.check([(place, step * (1 + place % 4), 4 + (place + step) % 6) for place in range(32)], atol, quantised)
    for step in range(19):
        nets.check([(place, 3 * (1 + place % 4) + 1 + step, 1) for place in range(32)], atol, quantised)
    nets.check([(place, 3 * (1 + place % 4) + 20, 1 + place % 9) for place in range(32)], atol, quantised)


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize(("heads", "updates"), [((1, 33), 8), ((1, 65), 10), ((1, 129), 8), ((16, 32), 10)])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_states_that_are_streamed_on_a_gpu(
    dtype: torch.dtype, quantised: bool, atol: float, heads: tuple[int, int], updates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Odd numbers of heads, by many programs and by few that have many each, of sequences of all lengths that begin and
    go on while others end, and rows that fill up.
    """
    from phalanx.kernels.gpu import delta_stream
    from tests.kernels.delta_nets import Nets, random_net

    if not delta_stream.multiprocessors(torch.device("cuda")):
        pytest.skip("no Hopper")
    torch.manual_seed(0)
    nets = Nets(random_net(heads, (128, 128), 4, dtype, "cuda"), 20, updates=updates)
    filling, taken = (nets.spare, 0, 1), []
    step = delta_stream.step
    monkeypatch.setattr(delta_stream, "step", lambda *args: (taken.append(len(args[0])), step(*args)))
    for processors in (132, 7):
        monkeypatch.setattr(delta_stream, "multiprocessors", lambda device, all=processors: all)
        monkeypatch.setattr(delta_stream, "is_streamed", lambda *_: True)
        nets.check([(place, 0, 3 + place) for place in range(17)], atol, quantised)
        for at in range(19):
            going_on = [(place, 3 + place + at, 1) for place in range(17)]
            nets.check([*going_on[:5], filling, *going_on[5:], (18, at, 1), filling], atol, quantised)
        nets.check([(2, 0, 1)], atol, quantised)
    assert set(taken) == {20, 1}


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize(
    ("heads", "most", "updates"),
    [((16, 16), 4, 8), ((16, 32), 4, 8), ((16, 48), 3, 10), ((16, 32), 2, 8), ((1, 33), 4, 10)],
)
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_states_of_drafts_that_are_streamed_on_a_gpu(
    dtype: torch.dtype, quantised: bool, atol: float, heads: tuple[int, int], most: int, updates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One token to all, of sequences that go on behind any of them, begin and pause, beside rows that fill up and
    prompts, by many programs and by few that have many heads each.
    """
    from phalanx.kernels.gpu import delta_draft_stream
    from tests.kernels.delta_nets import Nets, random_net

    if not delta_draft_stream.multiprocessors(torch.device("cuda")):
        pytest.skip("no Hopper")
    torch.manual_seed(0)
    draw = random.Random(0)
    nets = Nets(random_net(heads, (128, 128), 4, dtype, "cuda"), 60, most=most, updates=updates)
    filling, taken = (nets.spare, 0, 1), []
    step = delta_draft_stream.step
    monkeypatch.setattr(delta_draft_stream, "step", lambda *args: (taken.append(len(args[0])), step(*args)))
    nets.check([(0, 0, most)], atol, quantised)
    nets.check([(0, 1, 2), (1, 0, 9)], atol, quantised)
    for processors, sequences in ((132, 4), (132, 50), (17, 11)):
        monkeypatch.setattr(delta_draft_stream, "multiprocessors", lambda device, all=processors: all)
        reached = dict.fromkeys(range(sequences), 0)
        for _ in range(12):
            spans = []
            for place in draw.sample(range(sequences), sequences - draw.randrange(3)):
                spans.append((place, reached[place], draw.randint(1, most)))
                reached[place] += draw.randint(1, spans[-1][2])
            for _ in range(draw.randrange(4)):
                spans.insert(draw.randint(0, len(spans)), filling)
            nets.check([(55, 0, 2), *spans, (56, 0, 40)], atol, quantised)
    assert len(taken) == 38
    assert min(taken) == most


def test_prompts_go_along_by_halves_where_that_was_shown_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hoppers, in bf16, and in no cut of 32 columns that nothing is loaded ahead of."""
    pytest.importorskip("triton")
    from phalanx.kernels.gpu import delta_prompts

    for hopper, dtype, narrow in (
        (True, torch.bfloat16, True),
        (True, torch.float16, False),
        (True, torch.float32, False),
        (False, torch.bfloat16, False),
    ):
        monkeypatch.setattr(delta_prompts, "is_hopper", lambda hopper=hopper: hopper)
        way = delta_prompts.way_along(dtype)
        assert (way == delta_prompts.NARROW[torch.bfloat16]) == narrow
        assert (way == delta_prompts.WIDE) != narrow
    assert delta_prompts.NARROW[torch.bfloat16][:2] != (32, 1)
