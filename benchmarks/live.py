"""What the cockpit's live view costs the engine.

    python benchmarks/live.py                # with the default model
    python benchmarks/live.py --modelled     # an engine that answers at once: the API process alone, at its limit
    python benchmarks/live.py --json FILE    # and write the figures

Rounds with views open and without alternate on one server, so that noise on a shared machine hits both alike; of the
pairs, the median counts. Two ratios come out: output tokens a second, and processor time a token of the server's
processes, which other programs on the machine disturb less. Beside them stands the cost itself: the processor time that
sampling takes of a second, measured in this process under a load of 64 requests that get 50 tokens a second each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
from serving import MODELLED, served, server

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan, Totals
from phalanx.server.messages import Books, NewToken, Started, Stepped
from phalanx.server.metrics import Metrics
from phalanx.web.expect import Baseline
from phalanx.web.live import Live

VIEWS = 4
ROWS, STEPS_A_SECOND, RANKS = 64, 50, 8


@contextmanager
def watched(url: str) -> Iterator[None]:
    """Views that read the stream, as browsers do."""
    over = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", url + "/cockpit/live", timeout=30) as answer:
            for _ in answer.iter_bytes():
                if over.is_set():
                    return

    views = [threading.Thread(target=watch) for _ in range(VIEWS)]
    for view in views:
        view.start()
    try:
        yield
    finally:
        over.set()
        for view in views:
            view.join()


@dataclass(frozen=True)
class Round:
    tokens_per_s: float
    cpu_us_per_token: float


def measure(url: str, modelled: bool) -> Round:
    before = cpu_seconds()
    with redirect_stdout(StringIO()):
        summary = served(256, 64, 32, 256, url) if modelled else served(16, 8, 64, 64, url)
    assert not summary.failures, summary.failures
    spent = cpu_seconds() - before
    return Round(summary.per_second(summary.output_tokens), spent / summary.output_tokens * 1e6)


def cpu_seconds() -> float:
    """Of the server, which is this process's child, and of all its processes."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def ratio(rounds: int, modelled: bool) -> dict[str, Any]:
    """Pairs of a round with views and one without, each time the other one first."""
    pairs: list[tuple[Round, Round]] = []
    with server(*(("-c", MODELLED) if modelled else ("-m", "phalanx.cli", "serve", "--port", "0"))) as url:
        measure(url, modelled)
        for number in range(rounds):
            found = {}
            for views in (False, True) if number % 2 else (True, False):
                with watched(url) if views else nullcontext():
                    found[views] = measure(url, modelled)
            bare, seen = found[False], found[True]
            pairs.append((bare, seen))
            print(
                f"round {number + 1}: without, {bare.tokens_per_s:,.0f} tok/s at {bare.cpu_us_per_token:,.1f} us of "
                f"processor a token; with, {seen.tokens_per_s:,.0f} at {seen.cpu_us_per_token:,.1f}",
                flush=True,
            )
    return {
        "views": VIEWS,
        "rounds": rounds,
        "tokens_per_s": statistics.median(seen.tokens_per_s / bare.tokens_per_s for bare, seen in pairs),
        "cpu_per_token": statistics.median(seen.cpu_us_per_token / bare.cpu_us_per_token for bare, seen in pairs),
    }


def sampling_share() -> float:
    """Of a second, what the API process spends on samples for the live view."""
    started = Started(100, 8192, ROWS, 8192, 16, [])
    totals = Totals()
    client = SimpleNamespace(started=started, live=ROWS, loading=None, ranks=list)
    client.totals = lambda: {rank: (totals, time.monotonic()) for rank in range(RANKS)}
    supervisor: Any = SimpleNamespace(state="ready", death=None, client=client, restarts_left=0)
    metrics = Metrics("m", vllm_names=False)
    live = Live(supervisor, metrics.recent)
    live.sampler.expectation = Baseline("")
    metrics.engine_started(8192)
    spent = []
    for second in range(30):
        began = time.thread_time()
        for step in range(STEPS_A_SECOND):
            done = second * STEPS_A_SECOND + step
            totals = Totals(steps=done, decodes=done * ROWS, context=done * ROWS * 1000, finished=done)
            metrics.recent.stepped(Stepped([NewToken(1, 5, None, 0, 0.0)] * ROWS, Books(ROWS, 0, 0, 0, 0, 0, totals)))
            for _ in range(ROWS):
                metrics.recent.token_gap.append(0.02)
        live.tick()
        live.event_since(live.sampler.taken - 1)
        spent.append(time.thread_time() - began)
    return statistics.median(spent)


def books_share() -> float:
    """Of a second, what rank 0 spends on the sums of its steps."""
    params = SamplingParams()
    plan = StepPlan(
        1,
        [Admission(0, 8, [1] * 8, 0, params)],
        list(range(ROWS)),
        [1000] * ROWS,
        [1] * ROWS,
        [True] * ROWS,
        [],
    )
    totals, began = Totals(), time.thread_time()
    for _ in range(1000):
        totals.launched(plan)
    return (time.thread_time() - began) / 1000 * STEPS_A_SECOND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--modelled", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "api_process_share": sampling_share(),
        "engine_process_share": books_share(),
        "open_views": ratio(arguments.rounds, arguments.modelled),
    }
    found = results["open_views"]
    print(f"with {VIEWS} views open: {found['tokens_per_s']:.1%} of the output without,")
    print(f"{found['cpu_per_token']:.1%} of the processor time a token")
    print(f"sampling takes {results['api_process_share']:.2%} of the API process, whether or not someone looks")
    print(f"the sums of steps take {results['engine_process_share']:.3%} of the engine process")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
