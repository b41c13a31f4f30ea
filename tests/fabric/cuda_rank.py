"""One rank of tests/fabric/test_peer_cuda.py: `python -m tests.fabric.cuda_rank WHAT FOLDER SIZE RANK`."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.fabric.group import FabricError, open_store
from phalanx.fabric.nccl import NcclGroup
from phalanx.fabric.peer import PeerGroup, one_shot_bytes
from phalanx.kernels.fp8 import Activations, Form, InBoth, Quantised
from phalanx.kernels.norm import add_rms_norm_in
from phalanx.kernels.quantise import quantise

DEVICE = torch.device("cuda", 0)
EPS = 1e-5
ROWS = (1, 2, 3, 7, 16, 17, 64, 129, 300)
WIDTHS = (144, 1024, 4096, 5120)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


class Checked:
    """A group whose every result is held against the definition, and kept in a digest."""

    def __init__(self, group: PeerGroup) -> None:
        self.group = group
        self.digest = 0

    def keep(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.digest = zlib.crc32(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes(), self.digest)

    def all_reduce(self, parts: list[Tensor]) -> None:
        found = self.group.all_reduce(parts[self.group.rank].clone())
        check_sum(found, parts)
        self.keep(found)

    def norm(self, parts: list[Tensor], residual: Tensor, weight: Tensor, form: Form) -> None:
        kept = residual.clone()
        poison(parts[0].nbytes)
        found = self.group.all_reduce_add_norm(parts[self.group.rank].clone(), kept, weight, EPS, form)
        self.keep(*check_norm(found, kept, parts, residual, weight))

    def gather(self, whole: Tensor, widths: list[int]) -> None:
        own = whole.split(widths, dim=1)[self.group.rank].contiguous()
        poison(whole.nbytes)
        found = self.group.all_gather_columns(own, widths)
        assert torch.equal(found, whole)
        self.keep(found)


def poison(size: int) -> None:
    """Memory that the allocator hands out next is full of NaN."""
    torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)


def summed(parts: list[Tensor]) -> Tensor:
    """The definition: float32 in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check_sum(found: Tensor, parts: list[Tensor]) -> None:
    exact = torch.stack([part.double() for part in parts]).sum(0)
    assert (found.double() - exact).norm() <= TOLERANCE[found.dtype] * exact.norm()
    assert torch.equal(found, summed(parts)), "not the bits of the definition"


def check_norm(
    found: Activations, kept: Tensor, parts: list[Tensor], residual: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """Held against the same two steps one after the other: the sum's bits, the norm up to its own rounding, and of a
    norm that comes in both forms the bits of the one brought to the other.
    """
    if isinstance(found, InBoth):
        for given, wanted_bits in zip(found.in_fp8, quantise(found.plain), strict=True):
            assert torch.equal(given, wanted_bits), "not what it is brought to"
        return check_norm(found.plain, kept, parts, residual, weight)
    apart = residual.clone()
    form = Form.FP8 if isinstance(found, Quantised) else Form.PLAIN
    wanted = add_rms_norm_in(form, summed(parts), apart, weight, EPS)
    assert torch.equal(kept, apart), "the residual"
    if not isinstance(found, Quantised):
        assert isinstance(wanted, Tensor)
        assert not found.isnan().any()
        assert (found.double() - wanted.double()).norm() <= TOLERANCE[found.dtype] * wanted.double().norm()
        return (kept, found)
    assert isinstance(wanted, Quantised)
    torch.testing.assert_close(found.scales, wanted.scales)
    off = (found.values.float() - wanted.values.float()).norm() / wanted.values.float().norm()
    assert off < 1e-2, float(off)
    return (kept, found.values.view(torch.uint8), found.scales.t())


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def split_unevenly(columns: int, size: int) -> list[int]:
    """One rank with a column too many, and with three ranks or more one with none."""
    each = columns // size // 8 * 8
    widths = [each] * size
    widths[0] += columns - sum(widths)
    if size > 2:
        widths[0], widths[1] = widths[0] + widths[1], 0
    return widths


def calls(checked: Checked, dtype: torch.dtype) -> None:
    size, random_calls = checked.group.size, random.Random(5)
    torch.manual_seed(9)
    for call in range(200):
        rows, width = random_calls.choice(ROWS), random_calls.choice(WIDTHS)
        kind = ("sum", Form.PLAIN, Form.FP8, Form.BOTH, "gather")[call % 5]
        if call == 100:
            rows, width, kind = 1500, 5120, "sum"  # more than the slots hold at once
        if kind == "gather":
            columns = random_calls.choice((1000, 4096, 32_003))
            checked.gather(randn(rows, columns, dtype=dtype), split_unevenly(columns, size))
            continue
        parts = [randn(rows, width, dtype=dtype) for _ in range(size)]
        if isinstance(kind, Form):
            residual, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
            checked.norm(parts, residual, weight, kind)
        else:
            checked.all_reduce(parts)


def graph(checked: Checked) -> None:
    """One graph with every kind of call in it; each replay gets inputs of its own."""
    group, dtype, shape, large = checked.group, torch.bfloat16, (5, 1024), (200, 1024)
    widths = [512] * group.size
    assert torch.Size(large).numel() * 2 > one_shot_bytes(group.size), "must be a two-shot"
    torch.manual_seed(3)
    weight = randn(1024, dtype=dtype)
    small, many, part, residual, columns = (
        randn(*each, dtype=dtype) for each in (shape, large, shape, shape, (7, widths[0]))
    )

    def step() -> tuple[Activations, ...]:
        added, (kept, again, third) = group.all_reduce(small.clone()), (residual.clone() for _ in range(3))
        normed = group.all_reduce_add_norm(part.clone(), kept, weight, EPS, Form.PLAIN)
        in_fp8 = group.all_reduce_add_norm(part.clone(), again, weight, EPS, Form.FP8)
        both = group.all_reduce_add_norm(part.clone(), third, weight, EPS, Form.BOTH)
        gathered = group.all_gather_columns(columns, widths)
        return added, group.all_reduce(many.clone()), normed, kept, in_fp8, both, gathered

    step()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        outputs = step()
    for _ in range(50):
        smalls, manys, parts, all_columns = (
            [randn(*each.shape, dtype=dtype) for _ in range(group.size)] for each in (small, many, part, columns)
        )
        before = randn(*shape, dtype=dtype)
        for target, given in ((small, smalls), (many, manys), (part, parts), (columns, all_columns)):
            target.copy_(given[group.rank])
        residual.copy_(before)
        recorded.replay()
        added, added_many, normed, kept, in_fp8, both, gathered = outputs
        assert isinstance(added, Tensor)
        assert isinstance(added_many, Tensor)
        assert isinstance(kept, Tensor)
        assert isinstance(gathered, Tensor)
        check_sum(added, smalls)
        check_sum(added_many, manys)
        for found in (in_fp8, both):
            check_norm(found, kept, parts, before, weight)
        assert torch.equal(gathered, torch.cat(all_columns, dim=1))
        checked.keep(added, added_many, gathered, *check_norm(normed, kept, parts, before, weight))


def gone(group: PeerGroup) -> None:
    """Rank 1 never comes to the second sum: rank 0 is told so while it waits, and its device is free once it closed."""
    x = torch.ones(1024, device=DEVICE)
    group.all_reduce(x)
    torch.cuda.synchronize()
    if group.rank == 1:
        return

    def check() -> None:
        raise FabricError("rank 1 is gone")

    group._check = check
    group.all_reduce(x)
    try:
        group.wait_for(torch.cuda.current_stream().record_event())
    except FabricError:
        group.close()
    else:
        raise AssertionError("the sum came without rank 1")
    torch.cuda.synchronize()
    assert float(torch.ones(8, device=DEVICE).sum()) == 8.0


def nccl(folder: str) -> None:
    group = NcclGroup(0, 1, DEVICE)
    group.connect(open_store(f"{folder}/rendezvous", 1), "127.0.0.1")
    x = torch.zeros(3, 64, device=DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        return group.all_reduce(x.clone()), group.all_gather_columns(x, [64])

    step()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        outputs = step()
    for _ in range(20):
        given = torch.randn(3, 64, device=DEVICE)
        x.copy_(given)
        recorded.replay()
        group.wait_for(torch.cuda.current_stream().record_event())
        assert all(torch.equal(output, given) for output in outputs)
    group.close()


def main() -> None:
    what, folder, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.cuda.set_device(DEVICE)
    if what == "nccl":
        nccl(folder)
        return
    group = PeerGroup(rank, size, DEVICE, None)
    store = open_store(f"{folder}/rendezvous", size)
    group.connect(store, "127.0.0.1")
    checked = Checked(group)
    ways: dict[str, Callable[[], None]] = {
        "calls-bfloat16": lambda: calls(checked, torch.bfloat16),
        "calls-float32": lambda: calls(checked, torch.float32),
        "graph": lambda: graph(checked),
        "gone": lambda: gone(group),
    }
    with torch.inference_mode():
        ways[what]()
    print(checked.digest)
    torch.cuda.synchronize()
    store.set(f"done-{rank}", "")
    for each in range(size):
        store.get(f"done-{each}")  # nobody's memory goes before all are done with it


if __name__ == "__main__":
    main()
