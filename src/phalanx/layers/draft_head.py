"""The head that drafts, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from phalanx.engine.whereabouts import HEAD
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.drafts import side_by_side
from phalanx.kernels.fp8 import Activations, Form, Quantised, plain
from phalanx.layers.hyper import HyperEnds, HyperStream
from phalanx.layers.layer import DecoderLayer
from phalanx.layers.linear import ColumnParallelLinear, given
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.rotary import Rotary
from phalanx.layers.step import StepContext
from phalanx.layers.stream import Ends, Stream
from phalanx.layers.vocabulary import Embedding, Head, ShortlistHead
from phalanx.spec.draft_head import DraftHead


class DraftHeadPart:
    """Makes of what it is handed, and the token behind, what it takes for the next token itself: it can go on and on.

    Its layer keeps of a position what it made of the token there and of the one behind.
    """

    def __init__(self, place: Place, record: DraftHead, embedding: Embedding, head: Head, rotary: Rotary) -> None:
        names, hyper = record.names, place.spec.hyper
        self.place, self.embedding, self.rotary = place, embedding, rotary
        self.head: Head | ShortlistHead = head
        self.embedded_norm = RmsNorm(place, record.prefix + names.embedded_norm)
        self.hidden_norm = RmsNorm(place, record.prefix + names.hidden_norm)
        self.joins = [ColumnParallelLinear(place, [record.prefix + name]) for name in names.joins]
        self.layer = DecoderLayer(place, len(place.spec.layers), record.layer, record.layer_prefix)
        self.ends = Ends(place) if hyper is None else HyperEnds(place, hyper, f"{record.prefix}hc_head.hc_")
        self.norm = RmsNorm(place, record.prefix + names.norm)

    def parts(self) -> Iterator[tuple[str, Part]]:
        own = (self.embedded_norm, self.hidden_norm, *self.joins, self.layer, self.ends, self.norm)
        return chain.from_iterable(part.parts() for part in own)

    def narrow_head(self) -> None:
        """Score by a copy of the head in fewer bits: the head is most of what a draft reads, and what is guessed may be
        a little off. The weights have to be there.
        """
        head, place = self.head, self.place
        assert isinstance(head, Head)
        major, minor = torch.cuda.get_device_capability(place.device)
        narrow = place.layout.narrow_head(f"{major}.{minor}")
        if narrow is None or place.dtype.itemsize != 2:
            return
        self.head = ShortlistHead(head) if narrow.bits == 4 else head.narrowed()

    def __call__(
        self,
        tokens: Tensor,
        handed: Activations,
        positions: Tensor,
        batch: AttentionBatch,
        block_size: int,
        rows: Tensor | None = None,
    ) -> Activations:
        """What these rows hand on, all by default, where all have these tokens behind them and were handed this."""
        step = StepContext(tokens, positions, batch, block_size, self.place.dtype, self.rotary)
        stream = self._begin(tokens, plain(handed))
        self.layer(stream, step, rows)
        return self.ends.finish(stream) if isinstance(stream, HyperStream) else self._normed(stream)

    def _begin(self, tokens: Tensor, handed: Tensor) -> Stream:
        if isinstance(self.ends, Ends):
            (join,) = self.joins
            return Stream(join(self._side_by_side(tokens, handed)))
        first, second = self.joins
        streams = second(self.hidden_norm(handed.flatten(0, -2))).view(handed.shape)
        return HyperStream(streams + first(self.embedded_norm(self.embedding(tokens)))[:, None])

    def _side_by_side(self, tokens: Tensor, handed: Tensor) -> Tensor:
        norms, eps = (self.embedded_norm.weight, self.hidden_norm.weight), self.hidden_norm.eps
        table = self.embedding.table
        if table is None:
            return side_by_side(self.embedding(tokens), handed, norms, eps)
        return side_by_side(table, handed, norms, eps, tokens)

    @property
    def _form(self) -> Form:
        """Of what is handed on, where it is scored as it is."""
        return Form.BOTH if self.head.product.takes_fp8 else Form.PLAIN

    def _normed(self, stream: Stream) -> Activations:
        if stream.part is None:
            return self.norm.given_as(self._form, stream.residual)
        return self.norm.of_sum(stream.part, stream.residual, self._form)

    def scores(self, handed: Activations) -> Tensor:
        """Logits of the token behind the one that a row was given."""
        return self.head(self._before_head(handed))

    def likeliest(self, handed: Activations) -> Tensor:
        """The token with the largest of these."""
        return self.head.likeliest(self._before_head(handed))

    def _before_head(self, handed: Activations) -> Tensor | Quantised:
        self.place.group.where.at(HEAD)
        if not isinstance(self.ends, Ends):
            handed = self.norm.given_as(self._form, self.ends.join(plain(handed)))
        return given(self.head.product, handed)
