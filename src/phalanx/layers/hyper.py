"""Several residual streams in the place of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.hyper import Mixing, Weights, join_streams, mix_streams, part_streams
from phalanx.kernels.moe import summed
from phalanx.kernels.pairs import Unsummed
from phalanx.layers.place import Place
from phalanx.layers.stream import Around, Stream
from phalanx.spec.hyper import Hyper


class HyperStream(Stream):
    """[tokens, streams, hidden]. `mixing` is how they go on behind the part that is being computed."""

    mixing: Mixing

    def take_rows(self, rows: Tensor | None) -> None:
        super().take_rows(rows)
        if rows is not None:
            self.mixing = Mixing(*(each[rows] for each in self.mixing))


class _Mapping:
    """The tensors of a mixing, whole on every rank."""

    def __init__(self, place: Place, path: str) -> None:
        self.path = path
        fn, base, scale = (place.empty_for(path + name) for name in ("fn", "base", "scale"))
        self.weights = Weights(fn, base, scale, place.spec.norm_eps)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("fn", "base", "scale"):
            yield self.path + name, getattr(self.weights, name)


class HyperAround:
    """Makes of all streams what a part of a layer takes, normed, and adds what it gives to each of them."""

    def __init__(self, place: Place, hyper: Hyper, path: str, norms: Around) -> None:
        self.hyper, self.norms, self.group = hyper, norms, place.group
        self.mapping = _Mapping(place, path)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.mapping.parts(), self.norms.parts())

    def enter(self, stream: Stream, form: Form) -> Activations:
        assert isinstance(stream, HyperStream)
        taken, stream.mixing = part_streams(stream.residual, self.mapping.weights, self.hyper)
        return self.norms.enter(Stream(taken), form)

    def leave(self, part: Tensor | Unsummed, stream: Stream) -> None:
        assert isinstance(stream, HyperStream)
        stream.residual = mix_streams(stream.residual, self.group.all_reduce(summed(part)), stream.mixing)


class HyperEnds:
    """Every stream begins as what is embedded; at the end they are joined."""

    def __init__(self, place: Place, hyper: Hyper, path: str) -> None:
        self.hyper, self.mapping = hyper, _Mapping(place, path)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        return self.mapping.parts()

    def begin(self, embedded: Tensor) -> Stream:
        return HyperStream(embedded[:, None].expand(-1, self.hyper.streams, -1))

    def finish(self, stream: Stream) -> Tensor:
        return stream.residual

    def join(self, finished: Tensor) -> Tensor:
        return join_streams(finished, self.mapping.weights, self.hyper)
