"""What the server costs: its output against the bare engine's, and how fast one API process can stream.

    python benchmarks/serving.py                # both, with the default model
    python benchmarks/serving.py --rounds 0     # only how fast it streams
    python benchmarks/serving.py --json FILE    # and write the figures

Engine and server answer the same lengths in turn, in one run, so that noise on a shared machine hits both alike; the
best round of each counts. For the second figure a modelled runner answers at once: what is measured is the API
process alone, from the engine's messages to the bytes of the stream. Its processor time for a token is told too, which
neighbours on a shared machine change little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from phalanx.bench.serving.measure import LoadSummary
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.run import run as bench_serve

BATCH, INPUTS, OUTPUTS = 8, 256, 64
STREAMS, STREAM_TOKENS = 64, 512

MODELLED = (
    "from phalanx.runtime.config import EngineConfig; from phalanx.server.options import ServeOptions; "
    "from phalanx.web.serve import serve; "
    f"serve(EngineConfig(max_num_seqs={STREAMS}), ServeOptions(port=0), 'phalanx.bench.modelled_engine')"
)


@contextmanager
def server(*command: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address and its API process, once it is ready."""
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"at (\S+)/v1 ", process.stdout.readline())
        assert found is not None, "the server did not start"
        try:
            yield found.group(1), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def offline(folder: Path) -> float:
    """Output tokens a second of the engine alone."""
    file, case = folder / "offline.json", f"{BATCH}x{INPUTS}x{OUTPUTS}"
    command = (sys.executable, "-m", "phalanx.cli", "bench", "offline", "--cases", case, "--json", str(file))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(file.read_text())["results"][0]
    seconds = BATCH * INPUTS / result["prefill_tok_s"] + (OUTPUTS - 1) * result["tpot_ms"] / 1e3
    return BATCH * OUTPUTS / seconds


def served(requests: int, concurrency: int, inputs: int, outputs: int, url: str) -> LoadSummary:
    return bench_serve(
        Options(
            url=url,
            input_len=inputs,
            output_len=outputs,
            num_prompts=requests,
            warmup=concurrency,
            max_concurrency=concurrency,
        )
    )


def overhead(rounds: int) -> dict[str, Any]:
    """The server's share of the engine's own speed."""
    bare, through = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            bare = max(bare, offline(Path(folder)))
            with server("-m", "phalanx.cli", "serve", "--port", "0") as (url, _):
                summary = served(BATCH, BATCH, INPUTS, OUTPUTS, url)
            through = max(through, summary.per_second(summary.output_tokens))
            print(f"round {seed + 1}: engine {bare:.1f}, server {through:.1f} tok/s, {through / bare:.1%}", flush=True)
    return {"engine_tok_s": bare, "server_tok_s": through, "share": through / bare}


def streaming() -> dict[str, Any]:
    """Tokens a second one API process streams to its clients."""
    with server("-c", MODELLED) as (url, api):
        served(STREAMS, STREAMS, 32, STREAM_TOKENS, url)
        before = sum(api.cpu_times()[:2])
        summary = served(4 * STREAMS, STREAMS, 32, STREAM_TOKENS, url)
        spent = sum(api.cpu_times()[:2]) - before
    assert not summary.failures, summary.failures
    streamed = 5 * STREAMS * STREAM_TOKENS
    return {
        "streams": STREAMS,
        "tokens_per_s": summary.per_second(summary.output_tokens),
        "cpu_us_per_token": spent / streamed * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "streaming": streaming(),
    }
    told = results["streaming"]
    print(
        f"one API process streams {told['tokens_per_s']:,.0f} tokens/s to {STREAMS} clients, "
        f"with {told['cpu_us_per_token']:.1f} us of its processor time each"
    )
    if arguments.rounds:
        results["overhead"] = overhead(arguments.rounds)
        print(f"the server delivers {results['overhead']['share']:.1%} of the engine's own output")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
