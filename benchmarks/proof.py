"""What proofs cost: decode steps of two engines in turns, one with the option and one without.

    python benchmarks/proof.py canary
    python benchmarks/proof.py invariant --rows 32

Both have one rank, on CPUs, and time is that of the processor: what else the machine does does not count. With `canary`
that rank also digests its residual stream, which only ranks with others do; waiting for them is not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

from phalanx import LLM, SamplingParams
from phalanx.layers.watch import Canary

WARM_UP = 5
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "canary": ({"canary": False}, {"canary": True}),
    "invariant": ({}, {"invariant": True}),
}


def timed_step(llm: LLM) -> float:
    began = time.process_time()
    llm.engine.step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("option", choices=OPTIONS)
    parser.add_argument("--model", help="Default: the default model.")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights.")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()

    room = asked.context + asked.steps + WARM_UP + 16
    common = {
        "device": "cpu",
        "load_format": asked.load_format,
        "progress": False,
        "max_num_seqs": asked.rows,
        "max_model_len": room,
    }
    common["num_blocks"] = asked.rows * -(-room // 16) + 8
    with ExitStack() as stack:
        engines = [stack.enter_context(LLM(asked.model, **common, **given)) for given in OPTIONS[asked.option]]
        if asked.option == "canary":
            model = engines[1].engine.runner.model  # type: ignore[attr-defined]
            model.watch = Canary(len(model.layers), model.place.device)
        for llm in engines:
            rng = random.Random(0)
            params = SamplingParams(temperature=0, max_tokens=asked.steps + WARM_UP + 8, ignore_eos=True)
            for _ in range(asked.rows):
                llm.engine.add([rng.randrange(llm.engine.vocab) for _ in range(asked.context)], params)
            while any(len(request.output) < WARM_UP for request in llm.engine.scheduler.requests.values()):
                llm.engine.step()
        pairs = [(timed_step(engines[0]), timed_step(engines[1])) for _ in range(asked.steps)]
    without, with_it = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    print(f"{asked.option}, {asked.rows} rows: {without:.2f} ms without, {with_it:.2f} ms with: {ratio:.4f}")


if __name__ == "__main__":
    main()
