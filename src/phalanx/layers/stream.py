"""The residual stream: what a layer's parts take from it and how they add to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.moe import summed
from phalanx.kernels.pairs import Unsummed
from phalanx.kernels.unnormed import Unnormed
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Place


class Stream:
    """What has been summed up so far, and this rank's part of what is to be added: the next norm does that sum too."""

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual
        self.part: Tensor | Unsummed | None = None

    def take_rows(self, rows: Tensor | None) -> None:
        """Go on with these rows alone."""
        if rows is not None:
            self.residual = self.residual.index_select(0, rows)


class Ends:
    """Where the stream begins, and where it is whole again."""

    def __init__(self, place: Place) -> None:
        self.group = place.group

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def begin(self, embedded: Tensor) -> Stream:
        return Stream(embedded)

    def finish(self, stream: Stream) -> Tensor:
        if stream.part is None:
            return stream.residual
        return stream.residual.add_(self.group.all_reduce(summed(stream.part)))

    def join(self, finished: Tensor) -> Tensor:
        """There is one only."""
        return finished


class Around:
    """The norms before and after a part of a layer, either of which may be missing."""

    def __init__(self, place: Place, before: str | None, after: str | None) -> None:
        self.group = place.group
        self.scale = place.spec.residual_scale
        self.before = RmsNorm(place, before) if before else None
        self.after = RmsNorm(place, after) if after else None

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for norm in (self.before, self.after):
            if norm is not None:
                yield from norm.parts()

    def enter(self, stream: Stream, form: Form) -> Activations:
        """What the part takes, in this form where a norm makes it."""
        part, stream.part = stream.part, None
        if self.before is None:
            return stream.residual if part is None else stream.residual.add_(self.group.all_reduce(summed(part)))
        if part is not None:
            return self.before.of_sum(part, stream.residual, form)
        return self.before.given_as(form, stream.residual)

    def enter_unnormed(self, stream: Stream, form: Form) -> Unnormed | None:
        """What the part takes if it norms that itself. None where others have a share in it."""
        part = stream.part
        if self.before is None or self.group.size > 1 or not isinstance(part, Tensor):
            return None
        residual, kept = stream.residual, torch.empty_like(stream.residual)
        stream.residual, stream.part = kept, None
        return Unnormed(part, residual, kept, self.before.weight, self.before.eps, form)

    def leave(self, part: Tensor | Unsummed, stream: Stream) -> None:
        """Add this rank's share of what the part gives."""
        if self.after is not None:
            part = self.after(self.group.all_reduce(summed(part)))
        if self.scale != 1.0:
            part = summed(part) * self.scale
        if self.after is None:
            stream.part = part
        else:
            stream.residual = stream.residual + summed(part)
