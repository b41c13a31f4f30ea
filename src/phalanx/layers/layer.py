"""A layer of the decoder, built from its record in the spec."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.kernels.fp8 import Activations
from phalanx.kernels.layer import WholeLayer
from phalanx.kernels.moe import summed
from phalanx.kernels.unnormed import Unnormed
from phalanx.layers.ffn import build_ffn
from phalanx.layers.ffn.experts import Experts
from phalanx.layers.hyper import HyperAround
from phalanx.layers.mixers import build_mixer
from phalanx.layers.mixers.gqa import Attention
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.layers.stream import Around, Stream
from phalanx.layers.whole import whole_layer
from phalanx.spec.layer import Layer


class DecoderLayer:
    """A mixer and an FFN, each with its norms around it and added to the residual stream: two all-reduces."""

    def __init__(self, place: Place, number: int, layer: Layer, prefix: str) -> None:

        def around(part: str, before: str | None, after: str | None) -> Around | HyperAround:
            norms = Around(place, prefix + before if before else None, prefix + after if after else None)
            hyper = place.spec.hyper
            return norms if hyper is None else HyperAround(place, hyper, f"{prefix}{part}_hc.", norms)

        self.around_mixer = around("attn", layer.norms.before_mixer, layer.norms.after_mixer)
        self.mixer = build_mixer(place, layer.mixer, prefix)
        self.around_ffn = around("ffn", layer.norms.before_ffn, layer.norms.after_ffn)
        self.ffn = build_ffn(place, layer.ffn, prefix)
        self.record = layer
        self.number = number
        self.group = place.group
        self.whole: WholeLayer | None = None
        self._asked_for: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind run the same kernels."""
        return self.record, self.mixer.takes, self.ffn.takes

    def parts(self) -> Iterator[tuple[str, Part]]:
        for part in (self.around_mixer, self.mixer, self.around_ffn, self.ffn):
            yield from part.parts()

    def __call__(self, stream: Stream, step: StepContext, rows: Tensor | None = None) -> None:
        """Add to the stream; `rows` are those to go on with behind the mixer, all by default."""
        where = self.group.where
        where.at(2 * self.number)
        if step.is_plain and rows is None and self.in_one_call(stream, step):
            return
        taken = self.around_mixer.enter(stream, step.form(self.mixer.takes))
        if step.watch is not None:
            step.watch.mark(self.number, stream.residual)
        mixed = self.mixer(taken, step, rows)
        stream.take_rows(rows)
        step.rows = rows
        self.around_mixer.leave(mixed, stream)
        where.at(2 * self.number + 1)
        self.around_ffn.leave(self.ffn(self._enter_ffn(stream, step), step), stream)

    def _enter_ffn(self, stream: Stream, step: StepContext) -> Activations | Unnormed:
        around, form, unnormed = self.around_ffn, step.form(self.ffn.takes), None
        if isinstance(around, Around) and isinstance(self.ffn, Experts) and self.ffn.norms(len(stream.residual)):
            unnormed = around.enter_unnormed(stream, form)
        return around.enter(stream, form) if unnormed is None else unnormed

    def in_one_call(self, stream: Stream, step: StepContext) -> bool:
        """Whether that was done: a CPU has a kernel for the whole of some layers, `whole`."""
        if not isinstance(self.mixer, Attention):
            return False
        if self._asked_for is not self.mixer.cache:
            self._asked_for = self.mixer.cache
            self.whole = whole_layer(self.around_mixer, self.mixer, self.around_ffn, self.ffn)
        batch, rope = step.batch.of(self.mixer.cache_group), self.mixer.record.rope
        if self.whole is None or rope is None or batch.alone is None or len(stream.residual) > self.whole.most_rows:
            return False
        part = None if stream.part is None else summed(stream.part)
        stream.part = self.whole(stream.residual, part, step.turns(rope), batch.write_to, batch.alone)
        return True
