"""What the cockpit costs: the size of its files, the first paint, and how long a plan takes to come back.

    python benchmarks/cockpit.py                # all, against a studio on loopback
    python benchmarks/cockpit.py --json FILE    # and write the figures

Every figure is the median of its rounds with the slowest beside it. Plans are asked over HTTP with a connection that is
kept, one runtime each and a concurrency that was not asked before, so that none is remembered. The first paint needs
Chromium and playwright; without them it is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

ROUNDS = 7
FIRST_PAINT = """() => new Promise(done => new PerformanceObserver(list => {
    const painted = list.getEntries().find(entry => entry.name === "first-contentful-paint");
    if (painted) done(painted.startTime);
}).observe({type: "paint", buffered: true}))"""
PLANS = {
    "70B, 4xH100-SXM, Phalanx, 32 at once": ("Llama-3.3-70B", "4xH100-SXM", "phalanx", 1024, 256, 32),
    "70B, 4xH100-SXM, vLLM, 256 at once": ("Llama-3.3-70B", "4xH100-SXM", "vllm", 1024, 256, 256),
    "70B, 8xH100-SXM, SGLang, 256 at once": ("Llama-3.3-70B", "8xH100-SXM", "sglang", 1024, 256, 256),
    "70B, 8xH100-SXM, vLLM, 8000 + 2000 tokens": ("Llama-3.3-70B", "8xH100-SXM", "vllm", 8000, 2000, 64),
    "671B, 16xH200-SXM, TensorRT-LLM": ("DeepSeek-V3", "16xH200-SXM", "trtllm", 1024, 256, 128),
    "8B, 8xH100-SXM, Phalanx, 1000 at once": ("Qwen3-8B", "8xH100-SXM", "phalanx", 1024, 256, 1000),
}


@contextmanager
def studio() -> Iterator[str]:
    """The address of a running studio."""
    command = [sys.executable, "-m", "phalanx.cli", "studio", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        try:
            yield address
        finally:
            process.terminate()


def timed(call: Callable[[int], Any], rounds: int = ROUNDS) -> list[float]:
    """Milliseconds of each round."""
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        call(number)
        found.append((time.perf_counter() - began) * 1e3)
    return found


def plan_times(http: httpx.Client) -> dict[str, list[float]]:
    times = {}
    for name, (model, machine, engine, inputs, outputs, concurrency) in PLANS.items():
        degrees = [tp for tp in (1, 2, 4, 8, 16) if tp <= int(machine.partition("x")[0])]
        question = {
            "model": model,
            "machine": machine,
            "engines": engine,
            "tps": ",".join(map(str, degrees)),
            "input_tokens": inputs,
            "output_tokens": outputs,
        }

        def ask(number: int, question: dict[str, Any] = question, concurrency: int = concurrency) -> None:
            http.post("/cockpit/plan", json=question | {"concurrency": concurrency + number}).raise_for_status()

        times[name] = timed(ask)
    return times


def while_planning(address: str) -> list[float]:
    """Other answers of the same server while it plans without a pause."""
    done = threading.Event()

    def plan() -> None:
        with httpx.Client(base_url=address, timeout=60) as http:
            while not done.is_set():
                plan_times(http)

    planning = threading.Thread(target=plan)
    planning.start()
    try:
        with httpx.Client(base_url=address, timeout=60) as http:
            time.sleep(0.5)
            return timed(lambda _: http.get("/cockpit/about"), 200)
    finally:
        done.set()
        planning.join()


def first_paints(address: str) -> list[float]:
    """From navigation to the first content, each in a browser context without a cache."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        found = []
        for _ in range(ROUNDS):
            page = browser.new_page()
            page.goto(address)
            found.append(page.evaluate(FIRST_PAINT))
            page.close()
        browser.close()
    return found


def sizes() -> dict[str, int]:
    bodies = [path.read_bytes() for path in (files("phalanx.web") / "static").iterdir()]
    return {"bytes": sum(map(len, bodies)), "gzipped": sum(len(gzip.compress(body)) for body in bodies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"files": sizes()}
    with studio() as address:
        with httpx.Client(base_url=address, timeout=60) as http:
            http.get("/cockpit/catalog").raise_for_status()
            times = {f"plan: {name}": found for name, found in plan_times(http).items()}
        times["another answer while it plans"] = while_planning(address)
        if shutil.which("chromium"):
            times["first paint"] = first_paints(address)
    figures["ms"] = {name: {"median": median(found), "slowest": max(found)} for name, found in times.items()}
    table = Table(title=f"Cockpit: {figures['files']['bytes'] / 1000:.0f} KB of files")
    for heading in ("", "median ms", "slowest ms"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in figures["ms"].items():
        table.add_row(name, f"{row['median']:.1f}", f"{row['slowest']:.1f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
