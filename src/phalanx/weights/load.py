"""Fills a rank's share of a model from a reader."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.kernels.cache import CacheScales
from phalanx.kernels.fp8 import Fp8Weight, quantise_blocks, quantise_channels
from phalanx.layers.decoder import Decoder
from phalanx.layers.linear import Part
from phalanx.spec import Layout
from phalanx.spec.formats import FORMATS, Quantization
from phalanx.spec.tensors import Pairs
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.reader import Reader, Slices
from phalanx.weights.views import ViewReader

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""

_NAMED_IN_ERROR = 3
_UNTOLD = Quantization(FORMATS["fp8"])
"""What e4m3 weights need where the configuration says nothing of them."""


def load_weights(model: Decoder, reader: Reader, progress: Progress) -> None:
    """Stream this rank's slices from the files into the model, one tensor at a time; nothing else is read."""
    layout, rank = model.place.layout, model.place.group.rank
    check_tensors(layout, reader)
    targets = list(model.parts())
    total, done = sum(target.nbytes for _, target in targets), 0
    for name, target in targets:
        if target.numel():
            tensor = layout.spec.tensors[name]
            _fill(target, reader, layout, tensor, layout.slices(tensor, rank))
        done += target.nbytes
        progress(done, total)
    if model.place.fp8_cache:
        for layer in model.layers:
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


def check_tensors(layout: Layout, reader: Reader) -> None:
    """Refuse a checkpoint that lacks a tensor or has one of another shape, before anything is read."""
    tensors = layout.spec.tensors.values()
    missing = [tensor.name for tensor in tensors if reader.shape(tensor.name) is None]
    if missing:
        named = ", ".join(missing[:_NAMED_IN_ERROR])
        more = f" and {len(missing) - _NAMED_IN_ERROR} more" if len(missing) > _NAMED_IN_ERROR else ""
        raise CheckpointError(
            "missing_tensor",
            f"The checkpoint lacks {len(missing)} of {len(layout.spec.tensors)} tensors: {named}{more}.",
            "Download the whole checkpoint, or check that config.json belongs to it.",
        )
    unknown = reader.unknown() if isinstance(reader, ViewReader) else []
    if unknown:
        named = ", ".join(unknown[:_NAMED_IN_ERROR])
        raise CheckpointError(
            "unknown_tensor",
            f"The checkpoint has {len(unknown)} tensors that the configuration does not tell of, such as {named}.",
            "Check that config.json belongs to these weights.",
        )
    for tensor in tensors:
        _check_shape(reader, tensor.name, tensor.shape)
        if reader.is_fp8(tensor.name):
            stored = layout.spec.stored_fp8 or _UNTOLD
            _check_shape(reader, tensor.name + stored.scales, stored.grid(tensor.shape))


def _check_shape(reader: Reader, name: str, shape: tuple[int, ...]) -> None:
    found = reader.shape(name)
    if found != shape:
        raise CheckpointError(
            "misshapen_tensor",
            f"{name} has shape {list(found) if found else 'none'}, but the configuration makes it {list(shape)}.",
            "Check that config.json belongs to these weights.",
        )


def _fill(target: Part, reader: Reader, layout: Layout, tensor: TensorSpec, slices: Slices) -> None:
    """Into FP8 memory values and scales go as they are stored; what is stored wider is brought to FP8 here."""
    values, stored = reader.read(tensor.name, slices), layout.spec.stored_fp8
    if stored is None or not reader.is_fp8(tensor.name):
        values = _half_split(values, tensor.pairs)
        if isinstance(target, Fp8Weight):
            assert stored is not None
            quantised = quantise_blocks(values) if stored.block > 1 else quantise_channels(values)
            target.fill(*quantised, stored.block)
        else:
            target.copy_(values)
        return
    scales = reader.read(tensor.name + stored.scales, _tiles(slices, stored))
    if isinstance(target, Fp8Weight):
        _check_pairs(tensor, stored)
        scales = scales if stored.block > 1 else _half_split(scales, tensor.pairs)
        target.fill(_half_split(values.view(torch.uint8), tensor.pairs).view(values.dtype), scales, stored.block)
    else:
        target.copy_(_half_split(widen(values, scales, slices, stored), tensor.pairs))


def _half_split(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Rows of whole heads, with rotary pairs that lay side by side half of the rotated dimensions apart."""
    if pairs is None:
        return rows
    heads = rows.unflatten(0, (-1, pairs.head)).clone()
    turned = heads[:, pairs.first : pairs.first + pairs.rotated]
    turned.copy_(turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).clone())
    return heads.flatten(0, 1)


def _check_pairs(tensor: TensorSpec, stored: Quantization) -> None:
    """Rows may change places only where they share their scale."""
    pairs, block = tensor.pairs, stored.block
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


def _tile(stored: Quantization) -> tuple[int, int | None]:
    assert stored.format.tile is not None
    return stored.format.tile


def _tiles(slices: Slices, stored: Quantization) -> Slices:
    """The scales of the tiles that a part of a matrix touches."""
    return tuple(
        slice(0, 1) if size is None else slice(part.start // size, -(-part.stop // size))
        for part, size in zip(slices, _tile(stored), strict=True)
    )


def widen(values: Tensor, scales: Tensor, slices: Slices, stored: Quantization) -> Tensor:
    """FP8 to float32: every element times the scale of the tile it lies in, wherever the slice begins."""
    grid = scales.float()
    for axis, (part, size) in enumerate(zip(slices, _tile(stored), strict=True)):
        if size is not None:
            tile = torch.arange(part.start, part.stop) // size - part.start // size
            grid = grid.index_select(axis, tile)
    return values.float() * grid
