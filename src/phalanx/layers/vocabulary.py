"""Embedding and head, split by vocabulary rows."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.candidates import BestTokens
from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import Fp8Weight, Quantised
from phalanx.kernels.gemm import FourBitGemm, Fp8Gemm, Gemm, PanelGemm, Product
from phalanx.kernels.panels import Panels
from phalanx.kernels.sampling import likeliest
from phalanx.kernels.shortlist import best_of_ranks, look_again
from phalanx.layers.place import Part, Place

MOST_SHORTLISTED = 64
"""Rows. The product of more with four bits takes as long as with sixteen: it is bound by arithmetic."""


class Embedding:
    """Each rank looks up the tokens it owns; the all-reduce adds the zeros of the others."""

    name = "model.embed_tokens.weight"

    def __init__(self, place: Place) -> None:
        self.place, self.group = place, place.group
        self.rows = place.shard.vocab
        self.scale = place.spec.embedding_scale
        rows, columns = place.share_of(self.name)
        self.weight: Part | Panels = place.matrix([self.name.removesuffix(".weight")], [rows], columns)

    def parts(self) -> Iterator[tuple[str, Part]]:
        assert not isinstance(self.weight, Panels)
        yield self.name, self.weight

    def pack(self) -> None:
        if not isinstance(self.weight, Tensor | Panels):
            self.weight = self.weight.panels()

    def _rows(self, tokens: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return F.embedding(tokens, self.weight)
        assert isinstance(self.weight, Panels)
        return self.weight.look_up(tokens)

    @property
    def table(self) -> Tensor | None:
        """All rows, where this rank has them and they are taken as they are."""
        whole = self.group.size == 1 and self.scale == 1.0
        return self.weight if whole and isinstance(self.weight, Tensor) else None

    def __call__(self, tokens: Tensor) -> Tensor:
        found = self._look_up(tokens)
        return found if self.scale == 1.0 else found * torch.tensor(self.scale, dtype=found.dtype)

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._rows(tokens)
        owned = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        if not len(self.rows):
            return self.group.all_reduce(self.place.empty(len(tokens), self.weight.shape[1]).zero_())
        found = self._rows((tokens - self.rows.start).where(owned, 0))
        return self.group.all_reduce(found * owned[:, None])


class Head:
    """Logits of the rank's own vocabulary rows, gathered so that every rank samples from the same whole."""

    name = "lm_head.weight"

    def __init__(self, place: Place, embedding: Embedding) -> None:
        self.group = place.group
        self.tied = embedding if place.spec.tied_embeddings else None
        self.rows = place.shard.vocab
        self.product: Gemm | PanelGemm | Fp8Gemm = self._product(place)
        self.scale = place.spec.logit_scale
        self.widths = [len(shard.vocab) for shard in place.layout.shards]

    def _product(self, place: Place) -> Gemm | PanelGemm:
        if self.tied is not None:
            weight = self.tied.weight
        else:
            rows, columns = place.share_of(self.name)
            weight = place.matrix([self.name.removesuffix(".weight")], [rows], columns)
        return place.gemm(weight, outputs=place.spec.vocab) if isinstance(weight, Tensor) else PanelGemm(weight)

    def parts(self) -> Iterator[tuple[str, Part]]:
        if self.tied is None:
            assert not isinstance(self.product.weight, Panels)
            yield self.name, self.product.weight

    def pack(self) -> None:
        """The embedding's panels are the head's too, where both are one matrix."""
        if isinstance(self.product, PanelGemm):
            if self.tied is not None:
                assert not isinstance(self.tied.weight, Tensor)
                self.product.weight = self.tied.weight
            self.product.pack()

    def narrowed(self) -> Head:
        """The same head with its weight in FP8: half the bytes to read, for scores that need not be exact."""
        weight, narrow = self.product.weight, copy(self)
        assert isinstance(weight, Tensor)
        narrow.product = Fp8Gemm(Fp8Weight.of(weight), None, weight.dtype)
        return narrow

    def __call__(self, hidden: Tensor | Quantised) -> Tensor:
        return self.gathered(self.product(hidden))

    def gathered(self, scores: Tensor) -> Tensor:
        """Every rank's products side by side, scaled."""
        whole = self.group.all_gather_columns(scores, self.widths)
        return whole if self.scale == 1.0 else whole.mul_(self.scale)

    def likeliest(self, hidden: Tensor | Quantised) -> Tensor:
        """The token of each row's largest logit."""
        return likeliest(self(hidden))


class ShortlistHead:
    """A head that reads a quarter of its weight: logits are those of a copy in four bits, but for the best of them,
    which are made again by the weight itself. So the likeliest token is nearly always the right one.
    """

    def __init__(self, head: Head) -> None:
        weight = head.product.weight
        assert isinstance(weight, Tensor)
        self.head, self.group, self.weight = head, head.group, weight
        self.product: Product = FourBitGemm(FourBitWeight.of(weight), None, weight.dtype)

    def __call__(self, hidden: Tensor | Quantised) -> Tensor:
        assert isinstance(hidden, Tensor)
        if len(hidden) > MOST_SHORTLISTED:
            return self.head(hidden)
        scores = self.product(hidden)
        self._look_again(scores, hidden)
        return self.head.gathered(scores)

    def likeliest(self, hidden: Tensor | Quantised) -> Tensor:
        """No rank needs the others' logits."""
        assert isinstance(hidden, Tensor)
        if len(hidden) > MOST_SHORTLISTED:
            return self.head.likeliest(hidden)
        found = self._look_again(self.product(hidden), hidden)
        if self.group.size == 1:
            return found.tokens
        return best_of_ranks(self.group.all_gather_columns(found.scored, [2] * self.group.size))

    def _look_again(self, scores: Tensor, hidden: Tensor) -> BestTokens:
        return look_again(scores, hidden, self.weight, self.head.rows.start)
