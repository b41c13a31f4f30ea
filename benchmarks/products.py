"""Products of a model alone on a GPU: `python benchmarks/products.py qwen3.5-35b-a3b-fp8`. A line for each shape, for
experts with what is between their two, for the norm before a router with its product and the choice, and each for every
number of rows, beside the bytes at the speed of a large copy.

The model is built with random weights and as many layers as no cache holds; a line is the mean of one product in all of
them, one behind the other in a graph. Every row has experts of its own, drawn evenly; those that are taken count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import microseconds
from h200_facts import MODELS
from torch import Tensor

from phalanx.bench.ceilings import measure_ceilings
from phalanx.fabric.group import Solo
from phalanx.kernels.fp8 import Activations, InBoth
from phalanx.kernels.gemm import Product
from phalanx.kernels.moe import expert_pairs
from phalanx.kernels.norm import add_rms_norm_in
from phalanx.kernels.quantise import quantise
from phalanx.kernels.unnormed import Unnormed
from phalanx.layers.decoder import Decoder
from phalanx.layers.ffn.experts import JOINED_ROWS, Experts
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import load_model
from phalanx.weights.checkpoint import Checkpoint

LAYERS = 12
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)


class Work(NamedTuple):
    """The same in several layers. Bytes and FLOPs are those of one."""

    name: str
    runs: list[Callable[[], object]]
    moved: int
    flops: int


def some_layers(config: dict[str, Any]) -> Decoder:
    """The first of a model's layers, with random weights."""
    few = config | {"num_hidden_layers": LAYERS}
    if "layer_types" in few:
        few["layer_types"] = few["layer_types"][:LAYERS]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(few))
        asked = EngineConfig(load_format="dummy")
        return load_model(asked, Checkpoint(Path(folder), "dummy"), Solo(), lambda done, total: None)


def works(model: Decoder, rows: int) -> Iterator[Work]:
    alike: dict[tuple[str, torch.Size], list[Product]] = defaultdict(list)
    for linear in model.linears():
        alike[type(linear.product).__name__, linear.product.weight.shape].append(linear.product)
    for (kind, (outputs, inputs)), products in alike.items():
        x = model.place.empty(rows, inputs).normal_()
        given = quantise(x) if products[0].takes_fp8 else x
        moved = products[0].weight.nbytes + rows * (inputs + outputs) * x.itemsize
        runs = [partial(product, given) for product in products]
        yield Work(f"{kind} {outputs}x{inputs}", runs, moved, 2 * rows * inputs * outputs)
    layers = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
    if layers:
        yield experts(model, layers, rows)
        if layers[0].table is None:
            yield routing(model, layers, rows)


def experts(model: Decoder, layers: list[Experts], rows: int) -> Work:
    record, held = layers[0].record, layers[0].held
    x = model.place.empty(rows, model.place.spec.hidden).normal_()
    in_fp8 = held.takes_fp8(x.dtype) and not record.router.weighs_input
    taken, each = InBoth(x, quantise(x)) if in_fp8 else x, record.router.experts_per_token
    chosen = torch.stack([torch.randperm(record.experts, device=x.device)[:each] for _ in range(rows)]).int()
    weights = torch.full(chosen.shape, 1 / each, device=x.device)
    runs = [
        partial(expert_pairs, taken, layer.held, weights, chosen, record.activation, record.router.weighs_input)
        for layer in layers
    ]
    stack, distinct = held.gate_up.shape[0], len(chosen.unique())
    moved = (held.gate_up.nbytes + held.down.nbytes) // stack * distinct + 2 * x.nbytes
    flops = 2 * chosen.numel() * (held.gate_up.numel() + held.down.numel()) // stack
    return Work(f"experts, {distinct} of {record.experts}", runs, moved, flops)


def routing(model: Decoder, layers: list[Experts], rows: int) -> Work:
    x, residual, kept = (model.place.empty(rows, model.place.spec.hidden).normal_() for _ in range(3))
    scale, joined = torch.ones_like(x[0]), layers[0].joins and rows <= JOINED_ROWS

    def run(layer: Experts) -> Tensor:
        given: Activations | Unnormed = Unnormed(x, residual, kept, scale, 1e-5, layer.takes)
        if not layer.norms(rows):
            given = add_rms_norm_in(layer.takes, x, residual, scale, 1e-5)
        routed, _gate = layer.choose(given, None, joined)
        return routed.experts

    runs, weight = [partial(run, layer) for layer in layers], layers[0].router.weight
    name = f"norm, router {len(weight)}x{weight.shape[1]} and choice"
    return Work(name, runs, weight.nbytes + 4 * x.nbytes, 2 * rows * weight.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    asked = parser.parse_args()
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    for name in asked.models:
        model = some_layers(MODELS[name])
        for rows in asked.rows:
            for work in works(model, rows):
                us, limit = microseconds(work.runs), ceilings.seconds(work.moved, 0.0) * 1e6
                told = {"model": name, "rows": rows, "product": work.name, "us": round(us, 2)}
                rates = {"limit_us": round(limit, 2), "tflop_s": round(work.flops / us / 1e6, 1)}
                print(json.dumps(told | rates), flush=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
