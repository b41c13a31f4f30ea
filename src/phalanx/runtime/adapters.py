"""A rank's share of an adapter."""

from __future__ import annotations

from safetensors.torch import load
from torch import Tensor

from phalanx.layers.adapters import Added
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.models.adapter import Adapter
from phalanx.weights.load import half_split


def hold_adapter(model: Decoder, number: int, adapter: Adapter) -> None:
    """Add it to the model's products, under its number. Of a matrix's rows and columns, a rank has the same as ever."""
    tensors = load(adapter.data)
    for linear in model.linears():
        parts = [_share(model.place, adapter, tensors, name) for name in linear.names]
        if any(part is not None for part in parts):
            added = Added.beside(parts, linear.rows)
            linear.adapters[number] = Added(*(_placed(part, model.place) for part in added))


def drop_adapter(model: Decoder, number: int) -> None:
    for linear in model.linears():
        linear.adapters.pop(number, None)


def _share(place: Place, adapter: Adapter, tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    module = adapter.modules.get(name)
    if module is None:
        return None
    tensor = place.spec.tensors[f"{name}.weight"]
    rows, columns = place.layout.slices(tensor, place.group.rank)
    up, run = tensors[module.up].float(), module.run
    if run is not None:
        up = up.unflatten(0, (-1, run.stride))[:, run.offset : run.offset + run.width].flatten(0, 1)
    up = half_split(up[rows], tensor.pairs) if tensor.pairs else up[rows]
    return tensors[module.down].float()[:, columns], adapter.scale * up


def _placed(part: Tensor, place: Place) -> Tensor:
    return part.to(place.device, place.dtype).contiguous()
