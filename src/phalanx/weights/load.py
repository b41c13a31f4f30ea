"""Fills a rank's share of a model from a reader."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.kernels.cache import CacheScales
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Part
from phalanx.quant import at_work
from phalanx.quant.base import GpuScheme
from phalanx.spec import Layout, Scheme
from phalanx.spec.tensors import Pairs
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.reader import DummyReader, Reader, Slices
from phalanx.weights.views import ViewReader

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""

_NAMED_IN_ERROR = 3


def load_weights(model: Decoder, reader: Reader, progress: Progress, checked: bool = False) -> None:
    """Stream this rank's slices from the files into the model, one tensor at a time; nothing else is read."""
    layout, rank = model.place.layout, model.place.group.rank
    if not checked:
        check_tensors(layout, reader, rank)
    targets = list(model.parts())
    total, done = sum(target.nbytes for _, target in targets), 0
    for name, target in targets:
        if target.numel():
            tensor = layout.spec.tensors[name]
            _fill(target, reader, layout, tensor, layout.slices(tensor, rank))
        done += target.nbytes
        progress(done, total)
    if model.place.fp8_cache:
        for layer in model.all_layers:
            path = layer.mixer.path
            layer.mixer.cache_scales = CacheScales(*(_cache_scale(reader, path, letter) for letter in "kv"))


def _cache_scale(reader: Reader, prefix: str, letter: str) -> float:
    """One number for all keys, or all values, of a layer, under whichever of its names; 1 where there is none."""
    scale = f"{letter}_scale"
    names = (scale, f"{letter}_proj.{scale}", f"attn.{scale}", f"{letter}_proj.output_scale")
    name = next((prefix + name for name in names if reader.shape(prefix + name) is not None), None)
    if name is None:
        return 1.0
    values = reader.read(name, tuple(map(slice, reader.shape(name) or ()))).flatten().tolist()
    if len(values) != 1 or not 0 < values[0] < math.inf:
        raise CheckpointError(
            "bad_cache_scale",
            f"{name} should be one number above 0; it is {', '.join(f'{value:g}' for value in values[:4])}.",
            "Use kv_cache_dtype auto, which needs no scales.",
        )
    return float(values[0])


def check_tensors(layout: Layout, reader: Reader, rank: int | None = None) -> None:
    """Refuse a checkpoint that lacks a tensor or has one that it should not, before anything is read or allocated.

    Of values that not every quantised format allows, only a rank's own are looked at, if one is named.
    """
    tensors = layout.spec.tensors.values()
    schemes = {tensor.name: reader.scheme_of(tensor.name) for tensor in tensors}
    _refuse_missing([name for name, scheme in schemes.items() if scheme is None and reader.shape(name) is None], layout)
    if unknown := reader.unknown():
        named = ", ".join(unknown[:_NAMED_IN_ERROR])
        raise CheckpointError(
            "unknown_tensor",
            f"The checkpoint has {len(unknown)} tensors that the configuration does not tell of, such as {named}.",
            "Check that config.json belongs to these weights.",
        )
    for tensor in tensors:
        scheme = schemes[tensor.name]
        if scheme is None:
            _check_shape(reader, tensor.name, tensor.shape)
            _check_told(reader, layout, tensor)
            if isinstance(reader, ViewReader):
                reader.check_plain(tensor)
        elif isinstance(reader, ViewReader):
            reader.check_pieces(tensor)
        else:
            _check_shape(reader, tensor.name, tensor.shape)
    if isinstance(reader, ViewReader):
        reader.check_stacks()
    _check_values(layout, reader, schemes, rank)


def _refuse_missing(missing: list[str], layout: Layout) -> None:
    if missing:
        named = ", ".join(missing[:_NAMED_IN_ERROR])
        more = f" and {len(missing) - _NAMED_IN_ERROR} more" if len(missing) > _NAMED_IN_ERROR else ""
        raise CheckpointError(
            "missing_tensor",
            f"The checkpoint lacks {len(missing)} of {len(layout.spec.tensors)} tensors: {named}{more}.",
            "Download the whole checkpoint, or check that config.json belongs to it.",
        )


def _check_shape(reader: Reader, name: str, shape: tuple[int, ...]) -> None:
    found = reader.shape(name)
    if found != shape:
        raise CheckpointError(
            "misshapen_tensor",
            f"{name} has shape {list(found) if found else 'none'}, but the configuration makes it {list(shape)}.",
            "Check that config.json belongs to these weights.",
        )


def _check_told(reader: Reader, layout: Layout, tensor: TensorSpec) -> None:
    """What the configuration tells of as four bits, and the file has wider, is not rounded behind anybody's back."""
    scheme = layout.spec.scheme_of(tensor) if layout.spec.quantization else None
    told = scheme is not None and not scheme.rounds and layout.spec.is_quantised(tensor)
    if told and not isinstance(reader, DummyReader):
        assert scheme is not None
        raise CheckpointError(
            "stored_wider",
            f"{tensor.name} is not quantised, but the configuration says it is, as {scheme.format.name}.",
            "List the module in config.json among those that are not converted.",
        )


def _check_values(layout: Layout, reader: Reader, schemes: dict[str, Scheme | None], rank: int | None) -> None:
    for name, scheme in schemes.items():
        if scheme is None or not at_work(scheme).checked:
            continue
        tensor = layout.spec.tensors[name]
        slices = tuple(map(slice, [0] * len(tensor.shape), tensor.shape))
        slices = slices if rank is None else layout.slices(tensor, rank)
        pieces = reader.read_pieces(name, slices, at_work(scheme).checked)
        obstacle = at_work(scheme).obstacle(pieces, slices)
        if obstacle is not None:
            raise CheckpointError(
                "bad_values", f"{name} {obstacle}.", "Use a version of the model that was quantised otherwise."
            )


def _fill(target: Part, reader: Reader, layout: Layout, tensor: TensorSpec, slices: Slices) -> None:
    """Quantised memory takes what is stored as it is; what is stored wider is rounded here."""
    scheme = reader.scheme_of(tensor.name)
    order = half_split(torch.arange(slices[0].stop - slices[0].start), tensor.pairs) if tensor.pairs else None
    if scheme is None:
        values = reader.read(tensor.name, slices)
        values = values if order is None else values[order]
        if isinstance(target, Tensor):
            target.copy_(values)
        else:
            told = layout.spec.scheme_of(tensor)
            assert told is not None
            kept = at_work(told)
            assert isinstance(kept, GpuScheme)
            kept.round(target, values)
        return
    pieces = reader.read_pieces(tensor.name, slices)
    if isinstance(target, Tensor):
        values = at_work(scheme).widen(pieces, slices)
        target.copy_(values if order is None else values[order])
    else:
        _check_pairs(tensor, scheme)
        at_work(scheme).fill(target, pieces, slices, order)


def half_split(rows: Tensor, pairs: Pairs) -> Tensor:
    """Rows of whole heads, with rotary pairs that lay side by side half of the rotated dimensions apart."""
    heads = rows.unflatten(0, (-1, pairs.head)).clone()
    turned = heads[:, pairs.first : pairs.first + pairs.rotated]
    turned.copy_(turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).clone())
    return heads.flatten(0, 1)


def _check_pairs(tensor: TensorSpec, scheme: Scheme) -> None:
    """Rows may change places only where they share their scale."""
    pairs, block = tensor.pairs, scheme.format.tile[0] if scheme.format.tile else 1
    if pairs is None or block == 1:
        return
    for head in range(0, tensor.shape[0], pairs.head):
        first = head + pairs.first
        if first // block != (first + pairs.rotated - 1) // block:
            raise CheckpointError(
                "cut_scales",
                f"{tensor.name} has a scale for every {block} rows, and rotary pairs that lie in two of them.",
                "Use the bf16 version of this model.",
            )
