"""What proofs cost: decode steps of two engines in turns, one with the option and one without.

    python benchmarks/proof.py canary
    python benchmarks/proof.py invariant --rows 32
    python benchmarks/proof.py trace --rows 4
    python benchmarks/proof.py invariant --device cuda --model llama-3.1-8b --rows 32 --context 1024

Both engines have one rank, with `canary` and `trace` the share of one of two, whose collectives take no time: waiting
for others is not in it. On CPUs time is that of the processor: what else the machine does does not count. On a GPU it
is the wall clock's over runs of steps, of which the first ones are left out: steps of the other engine may still be on
their way. With `trace` it is one engine, in turns of traced steps and others. With `--dtype fp32` both engines widen
weights that a CPU would multiply as they are stored. A model of `h200_facts.py` has random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from h200_facts import MODELS

from phalanx.bench.timing import settled_memory
from phalanx.engine.core import Engine
from phalanx.engine.marks import MOST_STEPS
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.tracing import EngineTracer
from phalanx.fabric.emulated import EmulatedGroup
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.start import SOLO, start_engine
from phalanx.runtime.weight_watch import PAUSES
from phalanx.weights.checkpoint import locate

WARM_UP = 5
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "canary": ({"canary": False}, {"canary": True}),
    "invariant": ({}, {"invariant": True}),
}
GPU_RUN, GPU_LEFT_OUT = 20, 4
TRACED = 8


def one_step(engine: Engine) -> float:
    began = time.process_time()
    engine.step()
    return time.process_time() - began


def a_run(engine: Engine) -> float:
    """Mean seconds of a step among several on a GPU."""
    for _ in range(GPU_LEFT_OUT):
        engine.step()
    began = time.perf_counter()
    for _ in range(GPU_RUN):
        engine.step()
    return (time.perf_counter() - began) / GPU_RUN


def traced_and_not(engine: Engine, turns: int, on_gpu: bool) -> Iterator[tuple[float, float]]:
    """Steps without a trace and with one, of runs in turn. On a GPU a trace's first steps capture its graphs."""

    def some_steps() -> list[float]:
        return [a_run(engine)] if on_gpu else [one_step(engine) for _ in range(TRACED)]

    for _ in range(turns if on_gpu else turns // TRACED):
        plain = some_steps()
        tracer = EngineTracer(engine, MOST_STEPS, lambda traces: None)
        traced = some_steps()
        tracer.end()
        yield from zip(plain, traced, strict=True)


def round_by_round(steps: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Means of as many steps as there are between two readings of weights: each round has one."""
    size = PAUSES["cpu"]
    for first in range(0, len(steps) - size + 1, size):
        without, with_it = zip(*steps[first : first + size], strict=True)
        yield statistics.fmean(without), statistics.fmean(with_it)


def filled(engine: Engine, asked: argparse.Namespace, outputs: int) -> None:
    """All prompts computed, and the first steps of decoding made."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    for _ in range(asked.rows):
        engine.add([rng.randrange(engine.vocab) for _ in range(asked.context)], params)
    while any(len(request.output) < WARM_UP for request in engine.scheduler.requests.values()):
        engine.step()


def folder_of(model: str | None, stack: ExitStack) -> tuple[Path, str]:
    if model not in MODELS:
        return locate(model), "auto"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return folder, "dummy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("option", choices=(*OPTIONS, "trace"))
    parser.add_argument("--model", help="A folder, or one of h200_facts.py. Default: the default model.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto", help="Of both engines.")
    parser.add_argument("--load-format", help="dummy: random weights.")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()

    on_gpu = asked.device == "cuda"
    turns = max(2, asked.steps // GPU_RUN) if on_gpu else asked.steps
    outputs = 2 * turns * (GPU_RUN + GPU_LEFT_OUT if on_gpu else 1) + WARM_UP + 24
    room = asked.context + outputs + 16
    with ExitStack() as stack:
        folder, load_format = folder_of(asked.model, stack)
        common = {
            "device": asked.device,
            "dtype": asked.dtype,
            "load_format": asked.load_format or load_format,
            "max_num_seqs": asked.rows,
            "max_model_len": room,
            "num_blocks": asked.rows * -(-room // 16) + 8,
        }
        group = SOLO if asked.option == "invariant" else EmulatedGroup(2, lambda size: 0.0, torch.device(asked.device))
        options = OPTIONS.get(asked.option, ({},))
        engines = [
            stack.enter_context(closing(start_engine(EngineConfig(**common, **given), folder, lambda *_: None, group)))
            for given in options
        ]
        for engine in engines:
            filled(engine, asked, outputs)
        stack.enter_context(settled_memory())
        timed = a_run if on_gpu else one_step
        if asked.option == "trace":
            pairs = list(traced_and_not(engines[0], turns, on_gpu))
        else:
            steps = [(timed(engines[0]), timed(engines[1])) for _ in range(turns)]
            pairs = steps if on_gpu else list(round_by_round(steps))
    without, with_it = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    print(f"{asked.option}, {asked.rows} rows: {without:.3f} ms without, {with_it:.3f} ms with: {ratio:.4f}")


if __name__ == "__main__":
    main()
