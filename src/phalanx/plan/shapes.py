"""Which TP degrees an engine can load a model at, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from phalanx.errors import LayoutError
from phalanx.plan.engines import EngineTraits
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

MOST_RANKS = 64
"""The largest TP degree that is considered."""


@dataclass(frozen=True)
class Shape:
    """Whether a model loads at a TP degree. `expert_parallel`: only if every rank holds whole experts."""

    tp: int
    problems: tuple[str, ...] = ()
    nearest: tuple[int, ...] = ()
    expert_parallel: bool = False

    @property
    def is_legal(self) -> bool:
        return not self.problems

    @property
    def fix(self) -> str:
        if not self.nearest:
            return "No TP degree works with this engine; use another format or engine."
        return f"The nearest that works: TP={' or TP='.join(str(tp) for tp in self.nearest)}."


def shape(spec: ModelSpec, tp: int, engine: EngineTraits) -> Shape:
    """Judge a TP degree; an illegal one names every reason with its numbers and the nearest legal degrees."""
    problems = tuple(_problems(spec, tp, engine))
    if not problems:
        return Shape(tp)
    if _loads_with_whole_experts(spec, tp, engine):
        return Shape(tp, expert_parallel=True)
    legal = _legal_degrees(spec, engine)
    below, above = [other for other in legal if other < tp], [other for other in legal if other > tp]
    return Shape(tp, problems, tuple(below[-1:] + above[:1]))


@lru_cache(maxsize=64)
def _legal_degrees(spec: ModelSpec, engine: EngineTraits) -> tuple[int, ...]:
    return tuple(tp for tp in range(1, MOST_RANKS + 1) if not any(True for _ in _problems(spec, tp, engine)))


def _loads_with_whole_experts(spec: ModelSpec, tp: int, engine: EngineTraits) -> bool:
    """Expert parallel: the experts are dealt whole, so their own columns are never cut."""
    if tp == 1 or spec.moe is None or not engine.expert_parallel or spec.moe.experts % tp:
        return False
    return all(map(_is_of_experts, _problems(spec, tp, engine)))


def _is_of_experts(problem: str) -> bool:
    """Gone where the experts are dealt whole."""
    return problem.startswith("experts'")


def _problems(spec: ModelSpec, tp: int, engine: EngineTraits) -> Iterator[str]:
    if engine.deals_unevenly:
        yield from _undealable(spec, tp)
        return
    found = [*_indivisible(spec, tp), *(_cut_blocks(spec, tp) if engine.keeps_blocks_whole else ())]
    yield from found
    if all(map(_is_of_experts, found)):
        yield from _undealable(spec, tp)


def _undealable(spec: ModelSpec, tp: int) -> Iterator[str]:
    """Why whole units cannot be dealt to so many ranks: then what each would hold cannot be counted either."""
    try:
        Layout(spec, tp)
    except LayoutError as error:
        yield error.found.removesuffix(".")


def _indivisible(spec: ModelSpec, tp: int) -> Iterator[str]:
    """What must come out even where every rank holds the same shape."""
    if spec.heads % tp:
        yield f"{spec.heads} query heads do not divide by {tp}"
    if not spec.latent and spec.kv_heads % tp and tp % spec.kv_heads:
        yield f"{spec.kv_heads} KV heads and {tp} ranks do not divide each other"
    if spec.state_heads % tp:
        yield f"{spec.state_heads} delta-net key heads do not divide by {tp}"
    for what, columns in _columns(spec):
        if columns % tp:
            yield f"{what} {columns} columns do not divide by {tp}"


def _cut_blocks(spec: ModelSpec, tp: int) -> Iterator[str]:
    """Columns of a rank that end inside a block with one scale."""
    unit = spec.quantization.format.unit if spec.quantization else None
    if unit is None or spec.number_format in ("mxfp4", "nvfp4"):
        return
    for what, columns in _columns(spec):
        if columns % tp == 0 and columns // tp % unit:
            yield f"{what} {columns} columns over {tp} ranks are {columns // tp}, no multiple of the {unit}-wide block"
    if not spec.latent:
        kv_rows = max(spec.kv_heads // tp, 1) * spec.head_dim
        if kv_rows % unit and spec.number_format == "fp8":
            yield f"KV projections' {kv_rows} rows a rank are no multiple of the {unit}-wide block"


def _columns(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    if spec.intermediate:
        yield "FFN's", spec.intermediate
    if spec.moe is not None:
        yield "experts'", spec.moe.intermediate
        if spec.moe.shared:
            yield "shared expert's", spec.moe.shared
