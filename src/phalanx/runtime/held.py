"""What ranks hold of a checkpoint, by the memory that their layers would ask for. Nothing is read or allocated."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.fabric.group import Solo
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import place_of
from phalanx.spec import Layout, Scheme
from phalanx.weights.checkpoint import Checkpoint


class HeldWeights(NamedTuple):
    """Bytes of the weights that every token needs, of all experts, and of the head, on so many `ranks`; `scheme` is the
    format of most elements, None being plain numbers.
    """

    linear: int
    experts: int
    head: int
    scheme: Scheme | None
    ranks: int


def held_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, all_ranks: bool = False
) -> HeldWeights:
    """Of the rank that has the most, or of all ranks together."""
    spec, ranks = checkpoint.spec, range(config.tp)
    if not all_ranks:
        layout = Layout(spec, config.tp)
        most = max(ranks, key=lambda rank: layout.weight_bytes(rank, spec.number_format))
        ranks = range(most, most + 1)
    return _sum([_nowhere(config, checkpoint, device, _Rank(rank, config.tp)) for rank in ranks])


class _Rank(Solo):
    """One of several, for what depends on its number alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _nowhere(config: EngineConfig, checkpoint: Checkpoint, device: torch.device, group: _Rank) -> Place:
    with closing(checkpoint.open_reader(torch.device("cpu"))) as reader:
        place = place_of(config, checkpoint.spec, group, device, reader)
    return replace(place, device=torch.device("meta"))


def _sum(places: list[Place]) -> HeldWeights:
    sizes, elements = Counter[str](), Counter[Scheme | None]()
    spec = places[0].spec
    head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    for place in places:
        for name, part in Decoder(place).parts():
            tensor = spec.tensors[name]
            kind = "head" if name == head else "experts" if tensor.expert else "linear"
            sizes["rows" if kind != "head" and tensor.split == "vocab" else kind] += part.nbytes
            elements[None if isinstance(part, Tensor) else place.scheme_of(tensor)] += part.numel()
    return HeldWeights(sizes["linear"], sizes["experts"], sizes["head"], elements.most_common(1)[0][0], len(places))
