"""Linear layers: column-parallel in, row-parallel out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from phalanx.kernels.fp8 import Activations, Form, InBoth, Quantised
from phalanx.kernels.gemm import Product
from phalanx.layers.adapters import Added, StepAdapters
from phalanx.layers.place import Part, Place


class ColumnParallelLinear:
    """Several projections of one input as one product. Each rank computes its own output rows: nothing to exchange.

    `adapters` are what is added for rows that go by one, by its number.
    """

    def __init__(self, place: Place, names: Sequence[str]) -> None:
        self.names = names
        self.adapters: dict[int, Added] = {}
        bias = place.has(f"{names[0]}.bias")
        self.rows = [place.share_of(f"{name}.weight")[0] for name in names]
        columns = place.share_of(f"{names[0]}.weight")[1]
        self.product = place.product(names, self.rows, columns, place.empty(sum(self.rows)) if bias else None)

    def parts(self) -> Iterator[tuple[str, Part]]:
        for name, weight in zip(self.names, self.product.weight.split(self.rows), strict=True):
            yield f"{name}.weight", weight
        if self.product.bias is not None:
            for name, bias in zip(self.names, self.product.bias.split(self.rows), strict=True):
                yield f"{name}.bias", bias

    def __call__(self, x: Activations, adapters: StepAdapters | None = None) -> Tensor:
        out = self.product(given(self.product, x))
        return out if adapters is None else adapters.add(out, x, self.adapters)


class RowParallelLinear:
    """Each rank multiplies its own input columns and returns its part of a sum over ranks, which the next norm does.

    The bias counts once: rank 0 has it in its part. What adapters add is a part of such a sum too.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        self.adapters: dict[int, Added] = {}
        bias = place.has(f"{name}.bias")
        rows, columns = place.share_of(f"{name}.weight")
        self.rows = [rows]
        self.bias = place.empty(rows) if bias else None
        own_bias = self.bias if place.group.rank == 0 else None
        self.product = place.product([name], [rows], columns, own_bias, summed=True)

    @property
    def names(self) -> list[str]:
        return [self.name]

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield f"{self.name}.weight", self.product.weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias

    def __call__(self, x: Activations, adapters: StepAdapters | None = None) -> Tensor:
        out = self.product(given(self.product, x))
        return out if adapters is None else adapters.add(out, x, self.adapters)


Linear = ColumnParallelLinear | RowParallelLinear


def given(product: Product, x: Activations) -> Tensor | Quantised:
    """What this product takes of an input that others may share."""
    if not isinstance(x, InBoth):
        return x
    return x.in_fp8 if product.takes_fp8 else x.plain


def form_for(*linears: Linear) -> Form:
    """What these take of an input that they share."""
    in_fp8 = {linear.product.takes_fp8 for linear in linears}
    if len(in_fp8) > 1:
        return Form.BOTH
    return Form.FP8 if True in in_fp8 else Form.PLAIN
