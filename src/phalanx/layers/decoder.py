"""The decoder: layers in order, each built from its record in the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import pairwise
from math import prod

from torch import Tensor

from phalanx.engine.whereabouts import EMBEDDING, HEAD
from phalanx.errors import CheckpointError
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.gemm import Gemm, PanelGemm
from phalanx.kernels.panels import Panels
from phalanx.kernels.states import States
from phalanx.layers.adapters import StepAdapters
from phalanx.layers.draft_head import DraftHeadPart
from phalanx.layers.ffn.dense import Mlp
from phalanx.layers.hyper import HyperEnds
from phalanx.layers.layer import DecoderLayer
from phalanx.layers.linear import Linear
from phalanx.layers.mixers.delta import DeltaMixer
from phalanx.layers.mixers.gqa import Attention
from phalanx.layers.mixers.mla import LatentAttention
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.rotary import Rotary
from phalanx.layers.step import StepContext
from phalanx.layers.stream import Ends
from phalanx.layers.vocabulary import Embedding, Head
from phalanx.layers.watch import LayerWatch

CUTS = (1, 3, 7, 15)
"""Layers before which a graph is cut. To compute a layer takes a GPU at least twice as long as to launch it takes the
host: while a part is computed, one of twice as many layers is launched.
"""


class Decoder:
    """One rank's share of a decoder-only model. Built empty: `parts` names what has to be loaded."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.embedding = Embedding(place)
        self.ends = Ends(place) if place.spec.hyper is None else HyperEnds(place, place.spec.hyper, "model.hc_head.hc_")
        self.layers = [
            DecoderLayer(place, number, layer, f"model.layers.{number}.")
            for number, layer in enumerate(place.spec.layers)
        ]
        self.norm = RmsNorm(place, "model.norm")
        self.head = Head(place, self.embedding)
        self.rotary = Rotary(place, place.spec.ropes)
        self.kept = States([])
        self.watch: LayerWatch | None = None
        self._laid_out: list[tuple[str, Tensor | Panels]] | None = None
        record = place.spec.draft_head
        self.draft_head = DraftHeadPart(place, record, self.embedding, self.head, self.rotary) if record else None
        self.companion: Decoder | None = None
        """A smaller model that drafts for this one, with keys and values of its own in the same blocks."""

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Names and, for each, the memory that this rank's share of the tensor goes to."""
        yield from self.embedding.parts()
        for layer in self.layers:
            yield from layer.parts()
        yield from self.ends.parts()
        if self.draft_head is not None:
            yield from self.draft_head.parts()
        yield from self.norm.parts()
        yield from self.head.parts()

    @property
    def all_layers(self) -> list[DecoderLayer]:
        """With that of the head that drafts behind the others."""
        return self.layers if self.draft_head is None else [*self.layers, self.draft_head.layer]

    def products(self) -> Iterator[Gemm]:
        """The products whose weights are held as they are multiplied."""
        for layer in self.all_layers:
            for part in (layer.mixer, layer.ffn):
                yield from (product for product in part.products() if isinstance(product, Gemm))
        if isinstance(self.head.product, Gemm):
            yield self.head.product

    def lay_out(self) -> None:
        """Put what a CPU multiplies as it is stored into panels, once all is loaded."""
        plain = [(name, part) for name, part in self.parts() if isinstance(part, Tensor)]
        named = {id(linear.product): " and ".join(linear.names) for linear in self.linears()}
        self.embedding.pack()
        self.head.pack()
        found: list[tuple[str, object]] = [(self.embedding.name, self.embedding.weight)]
        if self.head.tied is None:
            found.append((self.head.name, self.head.product.weight))
        for number, layer in enumerate(self.all_layers):
            for part in (layer.mixer, layer.ffn):
                for product in part.products():
                    if isinstance(product, PanelGemm):
                        product.pack()
                    found.append((named.get(id(product), f"a matrix of layer {number}"), product.weight))
            found += ((f"an expert of layer {number}", weight) for weight in layer.ffn.lay_out())
        panels = [(name, weight) for name, weight in found if isinstance(weight, Panels)]
        for name, weight in panels:
            if not weight.is_finite:
                raise CheckpointError(
                    "bad_values",
                    f"There are numbers or scales that are not finite in {name}.",
                    "The file seems damaged: download it again.",
                )
        if panels:
            self._laid_out = [*plain, *panels]

    def weights(self) -> Iterator[tuple[str, object]]:
        """All weights, in the memory that they are multiplied from."""
        yield from self.parts() if self._laid_out is None else self._laid_out

    def linears(self) -> Iterator[Linear]:
        """The products that adapters can be added to."""
        for layer in self.layers:
            for part in (layer.mixer, layer.ffn):
                if isinstance(part, Attention | LatentAttention | DeltaMixer | Mlp):
                    yield from part.linears()

    @property
    def in_graphs(self) -> bool:
        """Whether a GPU computes all of it without asking the host."""
        return all(part.in_graphs for layer in self.layers for part in (layer.mixer, layer.ffn))

    @property
    def _with_blocks(self) -> list[DecoderLayer]:
        return [self.all_layers[number] for number in self.place.spec.with_blocks]

    def block_bytes(self, block_size: int) -> int:
        """What a block takes in the layers that have memory for blocks."""
        own = sum(layer.mixer.block_bytes(block_size) for layer in self._with_blocks)
        companion = self.companion.all_layers if self.companion else ()
        return own + sum(layer.mixer.block_bytes(block_size) for layer in companion)

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Make room for what the layers keep of all sequences.

        One block more than asked for stays spare, for rows that only fill up a batch.
        """
        self.block_size = block_size
        self.spare_block = blocks
        for layer in self._with_blocks:
            layer.mixer.allocate_cache(blocks + 1, block_size)
        owners = [layer.mixer for layer in self._with_blocks if layer.mixer.block_bytes(block_size)]
        for number, group in enumerate(self.place.spec.window_groups, start=1):
            for layer_number, owner in zip(group.layers, owners, strict=False):
                self.all_layers[layer_number].mixer.join_group(number, owner)
        if self.companion is not None:
            self.companion.allocate_whole(blocks, block_size)

    def allocate_whole(self, blocks: int, block_size: int) -> None:
        """The same for a companion, whose layers all keep whole sequences."""
        self.block_size, self.spare_block = block_size, blocks
        for layer in self.all_layers:
            layer.mixer.allocate_cache(blocks + 1, block_size)

    @property
    def state_bytes_per_place(self) -> int:
        """What one sequence keeps whatever its length."""
        states = (state for layer in self.all_layers for state in layer.mixer.states())
        return sum(prod(state.shape[1:]) * state.element_size() for state in states)

    def allocate_states(self, places: int) -> None:
        """Make room for what the layers keep of this many sequences whatever their lengths.

        Where there is that room already it is kept: a GPU may have none for a second one.
        """
        for layer in self.all_layers:
            held = layer.mixer.states()
            if all(len(state) == places for state in held):
                for state in held:
                    state.zero_()
            else:
                layer.mixer.allocate_states(places)
        self.kept = States(state for layer in self.all_layers for state in layer.mixer.states())

    def sketch(self) -> Decoder:
        """This model with few of its layers: every kernel of the whole in a fraction of its time.

        Weights and caches are the same ones; there has to be a cache already.
        """
        sketch = copy(self)
        sketch.layers = _some_of(self.layers)
        return sketch

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor | None = None,
        adapters: StepAdapters | None = None,
        cut: Callable[[], None] | None = None,
    ) -> Tensor:
        """What the stream holds before the last norm: of these rows, at least one of them, or of all.

        No row looks at another one behind the last mixer, so there the others are left out. `cut` is called where what
        follows may be launched while what came before is computed.
        """
        self.place.group.where.at(EMBEDDING)
        step = StepContext(
            tokens, positions, batch, self.block_size, self.place.dtype, self.rotary, adapters, self.watch
        )
        stream = self.ends.begin(self.embedding(tokens))
        for number, layer in enumerate(self.layers):
            if cut is not None and number in CUTS:
                cut()
            layer(stream, step, rows if layer is self.layers[-1] else None)
        hidden = self.ends.finish(stream)
        if self.watch is not None:
            self.watch.mark(len(self.place.spec.layers), hidden)
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits over the whole vocabulary, in the model's dtype, the same bits on every rank."""
        self.place.group.where.at(HEAD)
        return self.head(self.states(hidden))

    def states(self, hidden: Tensor) -> Tensor:
        """Behind the last norm."""
        return self.norm(self.ends.join(hidden))

    def handed_on(self, hidden: Tensor) -> Tensor:
        """What a head that drafts takes: all streams as they are, or the one that there is, normed."""
        return hidden if self.place.spec.hyper is not None else self.norm(hidden)


def _some_of(layers: list[DecoderLayer]) -> list[DecoderLayer]:
    """The first, the last, and one of each kind behind one of every kind that it follows: what a layer gives is taken
    in by the next one's norm.
    """
    steps = list(pairwise(layers))
    taken, seen = layers[:1], {(before.kind, layer.kind) for before, layer in steps[-1:]}
    for before, layer in steps:
        follows = before.kind, layer.kind
        if layer is layers[-1] or follows not in seen:
            seen.add(follows)
            taken += [layer] if taken[-1].kind == before.kind else [before, layer]
    return taken
