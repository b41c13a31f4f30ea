"""Is it warm when it says ready: `python benchmarks/warm.py`.

Starts an engine twice for each way to warm up, first without any kernel on disk, and puts the second one under a load
of random lengths at once: arrivals at random, prompts and answers of all sizes, greedy, drawn and penalised, in every
window the same ones but for their words. The time between two tokens of a request is told window by window; the last
column is the p99 of a window over that of the last. One process a start; the requests come in the engine's own
process. With `--once` the first start is the only one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h200_facts import MODELS

LIMITS = {"max_model_len": 4096}


def measure(options: argparse.Namespace) -> None:
    """Run in a process of its own: print one line of facts."""
    from phalanx.runtime.config import EngineConfig
    from phalanx.runtime.start import start_engine

    folder = Path(options.model)
    if options.model in MODELS:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(MODELS[options.model]))
    config = EngineConfig(load_format="dummy", warm_up=options.child, **LIMITS)
    imported = time.time()
    engine = start_engine(config, folder, progress=lambda done, total: None)
    ready = time.time()
    facts: dict[str, Any] = {
        "warm_up": options.child,
        "start_s": round(ready - options.began, 2),
        "import_s": round(imported - options.began, 2),
        "blocks": engine.scheduler.pool.num_blocks,
        "free_gib": free_gib(),
    }
    if options.load:
        facts |= Load(engine, options).run()
        facts["free_after_gib"] = free_gib()
    engine.close()
    print(json.dumps(facts), flush=True)


def free_gib() -> float | None:
    import torch

    return round(torch.cuda.mem_get_info()[0] / 2**30, 2) if torch.cuda.is_available() else None


class Load:
    """Requests of random lengths at random moments, as they come to a server."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self.engine = engine
        self.words = random.Random(2)
        self.rate, self.window, self.until = options.rate, options.window, options.until
        self.told: dict[int, float] = {}
        self.gaps: list[list[float]] = [[] for _ in range(int(self.until // self.window) + 1)]
        self.most_running = 0

    def run(self) -> dict[str, Any]:
        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        arrivals = self._arrivals()
        arrival, rng = next(arrivals)
        while (now := time.perf_counter() - began) < self.until + self.window:
            while arrival <= now:
                self._ask(rng)
                arrival, rng = next(arrivals)
            if self.engine.has_work:
                self._step(began)
            elif not self.engine.runner.tend():
                time.sleep(min(0.001, max(0.0, arrival - now)))
        return {"windows": [summary(gaps) for gaps in self.gaps], "most_running": self.most_running}

    def _arrivals(self) -> Iterator[tuple[float, random.Random]]:
        """When requests come, and the numbers to make each of."""
        for window in itertools.count():
            rng, arrival = random.Random(1), 0.0
            while (arrival := arrival + rng.expovariate(self.rate)) < self.window:
                yield window * self.window + arrival, random.Random(rng.random())

    def _ask(self, rng: random.Random) -> None:
        from phalanx.engine.sampling import SamplingParams

        inputs, outputs = (int(2 ** rng.uniform(low, high)) for low, high in ((2, 10.5), (3, 8)))
        wishes = rng.choice(({"temperature": 0}, {}, {"top_p": 0.9}, {"presence_penalty": 0.5, "logprobs": 2}))
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, **wishes)
        self.engine.add([self.words.randrange(self.engine.vocab) for _ in range(inputs)], params)

    def _step(self, began: float) -> None:
        outputs = self.engine.step()
        now = time.perf_counter() - began
        self.most_running = max(self.most_running, len(self.engine.scheduler.running))
        window = self.gaps[min(int(now // self.window), len(self.gaps) - 1)]
        for output in outputs:
            before = self.told.pop(output.request_id, None)
            if before is not None:
                window.append(now - before)
            if output.finish_reason is None:
                self.told[output.request_id] = now


def summary(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {name: round(1e3 * value, 3) for name, value in found.items()} | {"tokens": len(gaps)}


def start(options: argparse.Namespace, how: str, kernels: str, load: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", how, "--model", options.model, "--began", repr(time.time())]
    command += ["--rate", str(options.rate), "--window", str(options.window), "--until", str(options.until)]
    child = subprocess.run(
        command + ["--load"] * load, env=os.environ | {"TRITON_CACHE_DIR": kernels}, stdout=subprocess.PIPE, text=True
    )
    if child.returncode:
        return {"warm_up": how, "failed": child.returncode}
    facts: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    print(json.dumps(facts), flush=True)
    return facts


def table(rows: list[tuple[dict[str, Any], dict[str, Any]]], seconds: float) -> str:
    """Milliseconds between two tokens of a request."""
    lines = [
        "| way | first start | second | blocks | free GiB | window | tokens | p50 | p99 | p99.9 | max | p99 to last |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cold, warm in rows:
        if "failed" in warm or "failed" in cold:
            lines.append(f"| {warm['warm_up']} | failed: {cold.get('failed')}, {warm.get('failed')} |")
            continue
        windows = warm["windows"]
        for number, gaps in enumerate(windows):
            ratio = f"{gaps['p99'] / (windows[-1]['p99'] or 1):.2f}x"
            name = f"{number * seconds:g}-{(number + 1) * seconds:g} s"
            head = f"{warm['warm_up']} | {cold['start_s']} s | {warm['start_s']} s | {warm['blocks']}"
            memory = f"{warm['free_gib']}, {warm['free_after_gib']}"
            numbers = " | ".join(str(gaps[key]) for key in ("tokens", "p50", "p99", "p999", "max"))
            lines.append(f"| {head} | {memory} | {name} | {numbers} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", help="one of h200_facts.py, or a folder with a config.json")
    parser.add_argument("--warm-ups", nargs="*", choices=("quick", "full", "off"), default=["quick"])
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each window")
    parser.add_argument("--until", type=float, default=60.0, help="seconds from ready to the last window")
    parser.add_argument("--once", action="store_true", help="leave out the start without kernels on disk")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options)
        return
    rows = []
    for how in options.warm_ups:
        with tempfile.TemporaryDirectory() as kernels:
            cold = None if options.once else start(options, how, kernels, load=False)
            warm = start(options, how, kernels, load=True)
            rows.append((cold or warm, warm))
    print(table(rows, options.window))


if __name__ == "__main__":
    main()
