"""Embedding and head, split by vocabulary rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.layers.place import Place


class Embedding:
    """Each rank looks up the tokens it owns; the all-reduce adds the zeros of the others."""

    name = "model.embed_tokens.weight"

    def __init__(self, place: Place) -> None:
        self.group = place.group
        self.rows = place.shard.vocab
        self.scale = place.spec.embedding_scale
        self.weight = place.empty(*place.share_of(self.name))

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield self.name, self.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        found = self._look_up(tokens)
        return found if self.scale == 1.0 else found * torch.tensor(self.scale, dtype=found.dtype)

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        owned = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        if not len(self.rows):
            return self.group.all_reduce(self.weight.new_zeros(len(tokens), self.weight.shape[1]))
        found = F.embedding((tokens - self.rows.start).where(owned, 0), self.weight)
        return self.group.all_reduce(found * owned[:, None])


class Head:
    """Logits of the rank's own vocabulary rows, gathered so that every rank samples from the same whole."""

    name = "lm_head.weight"

    def __init__(self, place: Place, embedding: Embedding) -> None:
        self.group = place.group
        self.tied = place.spec.tied_embeddings
        weight = embedding.weight if self.tied else place.empty(*place.share_of(self.name))
        self.product = place.gemm(weight)
        self.scale = place.spec.logit_scale
        self.widths = [len(shard.vocab) for shard in place.layout.shards]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        if not self.tied:
            yield self.name, self.product.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        scores = self.group.all_gather_columns(self.product(hidden), self.widths)
        return scores if self.scale == 1.0 else scores.mul_(self.scale)
