"""What the cockpit's live view costs the engine.

    python benchmarks/live.py                # with the default model
    python benchmarks/live.py --modelled     # an engine that answers at once: the API process alone, at its limit
    python benchmarks/live.py --json FILE    # and write the figures

Two figures. The ratio: output tokens a second with views open over those without, in rounds that alternate on one
server, so that noise on a shared machine hits both alike; the median of the pairs counts. And, since noise may be
larger than the cost, the cost itself: the processor time that sampling takes of a second, measured in this process
under a load of 64 requests that get 50 tokens a second each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from serving import MODELLED, served, server

from phalanx.engine.plan import Admission, StepPlan, Totals
from phalanx.engine.sampling import SamplingParams
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


def tokens_a_second(url: str, modelled: bool) -> float:
    summary = served(256, 64, 32, 256, url) if modelled else served(16, 8, 64, 64, url)
    assert not summary.failures, summary.failures
    return float(summary.per_second(summary.output_tokens))


def ratio(rounds: int, modelled: bool) -> dict[str, Any]:
    """Pairs of a round with views and one without, each time the other one first."""
    pairs = []
    with server(*(("-c", MODELLED) if modelled else ("-m", "phalanx.cli", "serve", "--port", "0"))) as url:
        tokens_a_second(url, modelled)
        for number in range(rounds):
            speeds = {}
            for views in (False, True) if number % 2 else (True, False):
                if views:
                    with watched(url):
                        speeds[views] = tokens_a_second(url, modelled)
                else:
                    speeds[views] = tokens_a_second(url, modelled)
            pairs.append((speeds[False], speeds[True]))
            print(f"round {number + 1}: {pairs[-1][0]:,.1f} tok/s without, {pairs[-1][1]:,.1f} with", flush=True)
    return {"views": VIEWS, "pairs": pairs, "ratio": statistics.median(after / before for before, after in pairs)}


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
            totals = Totals(done, done * ROWS, decodes=done * ROWS, context=done * ROWS * 1000, finished=done)
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
        [[]] * ROWS,
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
    print(f"with {VIEWS} views open: {results['open_views']['ratio']:.1%} of the output without")
    print(f"sampling takes {results['api_process_share']:.2%} of the API process, whether or not someone looks")
    print(f"the sums of steps take {results['engine_process_share']:.3%} of the engine process")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
