"""Activation-aware scales (AWQ): columns that see large inputs are made larger before they are rounded, and what feeds
them as much smaller, so that the model computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.four_bit import round_int4, widen
from phalanx.spec import Gqa, ModelSpec
from phalanx.spec.ffn import Dense
from phalanx.spec.layer import Layer
from phalanx.weights.reader import Reader

Inputs = Mapping[str, Tensor]
"""Rows that linear layers were given, by the names of their weights."""

_STEPS = 20


class Pair(NamedTuple):
    """Matrices that share an input, and the tensor whose rows (of a norm: elements) make it."""

    feeds: str
    matrices: tuple[str, ...]


class Factors(NamedTuple):
    """What a tensor's rows and columns are multiplied by before it is written."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def apply(self, values: Tensor, plus: float = 0.0) -> Tensor:
        """`plus` is added to the values where they are used."""
        if self.rows is None and self.columns is None:
            return values
        wide = values.float() + plus
        if self.rows is not None:
            wide = wide * (self.rows if wide.dim() == 1 else self.rows[:, None])
        return ((wide if self.columns is None else wide * self.columns) - plus).to(values.dtype)

    def inverse(self) -> Factors:
        return Factors(*(None if part is None else 1 / part for part in self))


def pairs(spec: ModelSpec) -> Iterator[Pair]:
    """Of plain attention and dense FFNs; experts and other mixers are rounded as they are."""
    for number, layer in enumerate(spec.layers):
        yield from _of_layer(layer, f"model.layers.{number}.")


def _of_layer(layer: Layer, prefix: str) -> Iterator[Pair]:
    norms, mixer, ffn = layer.norms, layer.mixer, layer.ffn
    if isinstance(mixer, Gqa) and not mixer.gated:
        path = f"{prefix}{mixer.module}."
        if norms.before_mixer:
            heads = tuple(f"{path}{letter}_proj.weight" for letter in "qkv")
            yield Pair(f"{prefix}{norms.before_mixer}.weight", heads)
        if mixer.heads == mixer.kv_heads and not mixer.qkv_bias:
            yield Pair(f"{path}v_proj.weight", (f"{path}o_proj.weight",))
    if isinstance(ffn, Dense):
        path = f"{prefix}{ffn.module}."
        if norms.before_ffn:
            gates = (f"{path}gate_proj.weight", f"{path}up_proj.weight")
            yield Pair(f"{prefix}{norms.before_ffn}.weight", gates)
        yield Pair(f"{path}up_proj.weight", (f"{path}down_proj.weight",))


def balanced(spec: ModelSpec, reader: Reader, inputs: Inputs, group: int) -> dict[str, Factors]:
    """The factors of all tensors that change."""
    factors: dict[str, Factors] = {}
    for pair in pairs(spec):
        given = inputs.get(pair.matrices[0])
        if given is None or f"{pair.feeds.removesuffix('weight')}bias" in spec.tensors:
            continue
        whole = [tuple(slice(0, size) for size in spec.tensors[name].shape) for name in pair.matrices]
        matrices = [reader.read(name, part) for name, part in zip(pair.matrices, whole, strict=True)]
        stacked = torch.cat(matrices).float()
        best = best_factors(stacked, given.float(), group)
        for name in pair.matrices:
            factors[name] = factors.get(name, Factors())._replace(columns=best)
        factors[pair.feeds] = factors.get(pair.feeds, Factors())._replace(rows=1 / best)
    return factors


def best_factors(weight: Tensor, given: Tensor, group: int) -> Tensor:
    """Of powers of the inputs' mean size, the one with which rounding changes the outputs least; 1 is among them."""
    size = given.abs().mean(0).clamp_min(1e-4)
    found = {step: _power(size, step / _STEPS) for step in range(_STEPS)}
    losses = {step: _loss(weight, given, factors, group) for step, factors in found.items()}
    return found[min(losses, key=lambda step: losses[step])]


def _power(size: Tensor, exponent: float) -> Tensor:
    factors = size.pow(exponent)
    return factors / (factors.max() * factors.min()).sqrt()


def _loss(weight: Tensor, given: Tensor, factors: Tensor, group: int) -> float:
    rounded = widen(round_int4(weight * factors, group, True, torch.float16), "int4") / factors
    return float(((rounded - weight) @ given.t()).square().mean())
