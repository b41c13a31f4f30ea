"""How a model is split: what `Layout` deals to every rank, and what a step moves, as the cockpit draws it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from fastapi import APIRouter, Query

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.cost.work import compute_format
from phalanx.errors import LayoutError, ModelError, PhalanxError
from phalanx.models import catalog
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.server.errors import bad_request
from phalanx.spec.cache import StatePlaces
from phalanx.spec.formats import FORMATS
from phalanx.spec.layout import Layout
from phalanx.spec.machine import Gpu, Machine, gpus
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensors import Tensor

DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
MOST_RANKS = 1024
MOST_TOKENS = 1 << 20
_DEFAULT_MODEL = "Llama-3.3-70B"
_DEFAULT_TP = 4
_DEFAULT_GPU = "H100-SXM"
_PARTS = ("mixer_in", "mixer_out", "router", "ffn_in", "ffn_out")


@dataclass(frozen=True)
class Served:
    """The model an engine beside the cockpit holds."""

    name: str
    spec: ModelSpec
    tp: int


def layout_routes(served: Served | None = None) -> APIRouter:
    """Routes under `/cockpit/layout`. Models are named from the catalog only: no path is opened, nothing downloaded."""
    router = APIRouter(prefix="/cockpit/layout", include_in_schema=False)

    @router.get("/choices")
    async def tell_choices() -> dict[str, Any]:
        names = list(catalog.entries())
        return {
            "models": names if served is None or served.name in names else [served.name, *names],
            "formats": list(FORMATS),
            "gpus": [gpu.name for gpu in gpus()],
            "model": served.name if served else _DEFAULT_MODEL,
            "tp": served.tp if served else _DEFAULT_TP,
            "gpu": _DEFAULT_GPU,
        }

    @router.get("")
    def tell_layout(
        model: Annotated[str | None, Query(max_length=256)] = None,
        tp: Annotated[int, Query(ge=1, le=MOST_RANKS)] = served.tp if served else _DEFAULT_TP,
        format: Annotated[str | None, Query(max_length=32)] = None,
        gpu: Annotated[str, Query(max_length=64)] = _DEFAULT_GPU,
        tokens: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 16,
        layer: Annotated[int, Query(ge=0)] = 0,
        gpus: Annotated[int | None, Query(ge=1, le=MOST_RANKS)] = None,
    ) -> dict[str, Any]:
        try:
            name, spec = _model(model, served)
            if format is not None:
                spec = spec.in_format(catalog.check_format(format))
            chosen = Gpu.named(gpu)
        except PhalanxError as error:
            raise bad_request(str(error), error.code) from None
        told = {"name": name, "served": served is not None and name == served.name}
        return told | describe(spec, tp, chosen, tokens, min(layer, len(spec.layers) - 1), gpus)

    return router


def _model(name: str | None, served: Served | None) -> tuple[str, ModelSpec]:
    if served is not None and name in (None, served.name):
        return served.name, served.spec
    name = name or _DEFAULT_MODEL
    if catalog.find(name) is None:
        raise ModelError("unknown_model", f"{name!r} is not in the catalog.", "Choose one of its models.")
    return name, catalog.model(name)


def describe(spec: ModelSpec, tp: int, gpu: Gpu, tokens: int, layer: int, in_all: int | None = None) -> dict[str, Any]:
    """The split of a model over `tp` of these GPUs, and one layer of it in a step of `tokens`. With `in_all` GPUs there
    are replicas, whose ranks hold the same.

    Where the model cannot be dealt to so many ranks, `refusal` says why and the split is left out.
    """
    told = {
        "tp": tp,
        "format": spec.number_format,
        "gpu": gpu.name,
        "tokens": tokens,
        "layer": layer,
        "model": _numbers(spec),
        "degrees": [{"tp": degree, "refusal": _refusal(spec, degree)} for degree in DEGREES],
    }
    try:
        layout = Layout(spec, tp)
    except LayoutError as error:
        return told | {"refusal": str(error)}
    return told | {
        "refusal": None,
        "dealt": _dealt(layout),
        "ranks": [_rank(layout, rank) | {"room_bytes": room} for rank, room in enumerate(_room(spec, tp, gpu))],
        "card_bytes": gpu.memory_bytes,
        "replicas": max(1, (in_all or tp) // tp),
        "idle": max(0, (in_all or tp) % tp) if (in_all or tp) >= tp else 0,
        "parts": _parts(layout, gpu, tokens, layer),
        "cache": _cache(layout, layer),
        "all_reduce": _all_reduce(spec, tp, gpu, tokens),
    }


def _refusal(spec: ModelSpec, tp: int) -> str | None:
    try:
        Layout(spec, tp)
    except LayoutError as error:
        return str(error)
    return None


def _numbers(spec: ModelSpec) -> dict[str, Any]:
    kinds = [_kind(spec, layer) for layer in range(len(spec.layers))]
    distinct = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    names = ("hidden", "vocab", "heads", "kv_heads", "head_dim", "intermediate", "dtype", "parameters")
    moe = spec.moe
    return {name: getattr(spec, name) for name in names} | {
        "layers": len(spec.layers),
        "kinds": distinct,
        "kind_of_layer": [distinct.index(kind) for kind in kinds],
        "experts": moe.experts if moe else 0,
        "experts_per_token": moe.experts_per_token if moe else 0,
        "expert_intermediate": moe.intermediate if moe else 0,
        "shared_intermediate": moe.shared if moe else 0,
        "state_heads": spec.state_heads,
        "state_value_heads": spec.state_value_heads,
    }


def _kind(spec: ModelSpec, layer: int) -> dict[str, Any]:
    cache = spec.caches[layer]
    return {"mixer": cache.kind, "reach": cache.reach, "experts": spec.layers[layer].ffn.routed is not None}


def _dealt(layout: Layout) -> dict[str, dict[str, Any]]:
    """What is dealt: how much there is, the unit that is never cut, and the range of every rank."""
    spec, moe = layout.spec, layout.spec.moe
    shared_out = layout.query_unit
    kinds = {
        "query_heads": (spec.heads, spec.query_group * layout.kv_unit if layout.tp <= spec.kv_heads else shared_out),
        "kv_heads": (spec.kv_heads, layout.kv_unit),
        "state_heads": (spec.state_heads, 1),
        "ffn": (spec.intermediate, layout.column_unit(spec.intermediate)),
        "expert_ffn": (moe.intermediate, layout.column_unit(moe.intermediate, expert=True)) if moe else (0, 1),
        "shared_ffn": (moe.shared, layout.column_unit(moe.shared)) if moe else (0, 1),
        "vocab": (spec.vocab, layout.column_unit(spec.vocab, blocks=False)),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (total, unit) in kinds.items():
        shares: list[range] = [getattr(shard, name) for shard in layout.shards]
        if total:
            found[name] = {
                "total": total,
                "unit": unit,
                "blocks": name.endswith("ffn") and layout.block(name == "expert_ffn") is not None,
                "shares": [[share.start, share.stop] for share in shares],
                "uneven": len({len(share) for share in shares}) > 1,
                "replicated": sum(map(len, shares)) > total,
            }
    return found


def _room(spec: ModelSpec, tp: int, gpu: Gpu) -> list[int]:
    """Bytes that each rank has left for keys and values by the planner's count for Phalanx; negative where it lacks."""
    counted = fit(spec, Machine((gpu,) * tp), tp, ENGINES["phalanx"], weight_format=spec.number_format)
    return [rank.kv_bytes for rank in counted.ranks]


def _rank(layout: Layout, rank: int) -> dict[str, Any]:
    spec, held = layout.spec, layout.shards[rank].kv_heads
    others = [shard.rank for shard in layout.shards if shard.rank != rank and shard.kv_heads == held]
    return {
        "rank": rank,
        "weight_bytes": layout.weight_bytes(rank, spec.number_format),
        "kv_bytes_per_token": layout.kv_bytes_per_token(rank, spec.dtype),
        "kv_shared_with": others,
    }


def _parts(layout: Layout, gpu: Gpu, tokens: int, layer: int) -> dict[str, dict[str, Any]]:
    """The weights of a layer by the stage that uses them, whole and on every rank."""
    prefix = f"model.layers.{layer}."
    tensors = [tensor for tensor in layout.spec.stacked_tensors if tensor.name.startswith(prefix)]
    row_parallel = {_stem(tensor) for tensor in tensors if tensor.axis == 1}
    found: dict[str, list[Tensor]] = {part: [] for part in _PARTS}
    for tensor in tensors:
        part = _part(tensor, row_parallel)
        if part is not None:
            found[part].append(tensor)
    return {
        part: {
            "tensors": [_tensor(layout, tensor, prefix) for tensor in members],
            "seconds": max(_seconds(layout, rank, members, gpu, tokens) for rank in range(layout.tp)),
        }
        for part, members in found.items()
        if members
    }


def _stem(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _part(tensor: Tensor, row_parallel: set[str]) -> str | None:
    if tensor.name.endswith("layernorm.weight") and "attn." not in tensor.name:
        return None
    mixes = ".self_attn." in tensor.name or ".linear_attn." in tensor.name
    if _stem(tensor) in row_parallel:
        return "mixer_out" if mixes else "ffn_out"
    if mixes:
        return "mixer_in"
    return "router" if tensor.split is None else "ffn_in"


def _tensor(layout: Layout, tensor: Tensor, prefix: str) -> dict[str, Any]:
    spec = layout.spec
    shapes = [layout.shape(tensor, rank) for rank in range(layout.tp)]
    return {
        "name": tensor.name.removeprefix(prefix),
        "shape": tensor.shape,
        "axis": None if tensor.split is None else tensor.axis,
        "copies": tensor.copies,
        "shapes": shapes,
        "bytes": [spec.tensor_bytes(tensor, shape, spec.number_format) * tensor.copies for shape in shapes],
    }


def _seconds(layout: Layout, rank: int, tensors: Iterable[Tensor], gpu: Gpu, tokens: int) -> float:
    """The least a rank needs: the longer of reading the weights and multiplying by them at the GPU's peak."""
    spec, size, time = layout.spec, 0.0, 0.0
    for tensor in tensors:
        shape, copies, rows = layout.shape(tensor, rank), 1.0, float(tokens)
        if tensor.expert and spec.moe is not None:
            share = spec.moe.experts_per_token / spec.moe.experts
            copies, rows = spec.moe.experts * (1 - (1 - share) ** tokens), tokens * spec.moe.experts_per_token
        size += spec.tensor_bytes(tensor, shape, spec.number_format) * copies
        compute = compute_format(spec.number_format) if spec.is_quantised(tensor) else "bf16"
        time += 2 * prod(shape) * rows / gpu.peak(compute) if len(shape) > 1 else 0.0
    return max(size / gpu.bandwidth, time)


def _cache(layout: Layout, layer: int) -> dict[str, Any]:
    """What a layer keeps on every rank: bytes a token, and bytes of a sequence whatever its length, copies included."""
    spec, cache = layout.spec, layout.spec.caches[layer]
    places = StatePlaces.of(1, True, spec.drafts and not spec.goes_back).total - 1
    per_token = int(cache.numbers_per_token * FORMATS[spec.dtype].bits / 8)
    return {
        "token_bytes": [per_token * len(shard.kv_heads) // spec.kv_heads for shard in layout.shards],
        "state_bytes": [places * layout.state_bytes(cache, rank) for rank in range(layout.tp)],
    }


def _all_reduce(spec: ModelSpec, tp: int, gpu: Gpu, tokens: int) -> dict[str, Any]:
    """One of the two sums of a layer, and all of a step."""
    size = tokens * spec.hidden * FORMATS[spec.dtype].bits // 8
    link = Machine((gpu,) * tp).link(tp)
    seconds = all_reduce_seconds(size, tp, link, profile("phalanx").all_reduce)
    return {
        "bytes": size,
        "seconds": seconds,
        "count": 2 * len(spec.layers),
        "link": link.kind,
        "bandwidth": link.bandwidth,
    }
