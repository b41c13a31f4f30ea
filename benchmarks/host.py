"""What a step costs on the host: scheduling, booking its tokens, telling the ranks, preparing the sampler. No GPU.

    python benchmarks/host.py                               # this checkout
    python benchmarks/host.py --against ../other/src        # beside another one's sources, by turns in one run
    python benchmarks/host.py --against ../other/src --json host.json

Times are processor time of the measuring thread, the median of all steps, so that neighbours on a shared machine count
little. Each round is a process of its own; the rounds of the two checkouts alternate, and the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

STEPS = 120
CACHED_TOKENS = 131_072
VOCAB = 152_064
ROWS_UNDER_A_GRAMMAR = 64
PENALISED = 64
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A model that takes next to no time, in front of which what the sampler's host side does shows."""


def engine_of(sequences: int, blocks: int, longest: int = 8192):  # type: ignore[no-untyped-def]
    """The scheduler in front of no model; its answers are ordinary tokens."""
    from phalanx.engine.blocks import BlockPool
    from phalanx.engine.core import Engine
    from phalanx.engine.modelled import ModelledRunner
    from phalanx.engine.scheduler import Limits, Scheduler

    runner = ModelledRunner(lambda plan: 0.0, lambda slot, position: 1000 + (31 * slot + 17 * position) % 8000)
    limits = Limits(sequences, 8192, longest)
    return Engine(Scheduler(limits, BlockPool(blocks, 16), (2,)), runner, VOCAB)


def decoding(sequences: int):  # type: ignore[no-untyped-def]
    """An engine whose batch is full, all prompts computed."""
    from phalanx.engine.sampling import SamplingParams

    engine = engine_of(sequences, blocks=sequences * 64)
    for number in range(sequences):
        prompt = [(number * 7 + index) % 9000 for index in range(100 + number % 50)]
        engine.add(prompt, SamplingParams(max_tokens=800, seed=number))
    while engine.scheduler.waiting or any(
        request.length - request.computed > 1 for request in engine.scheduler.running
    ):
        engine.step()
    return engine


def timed(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def step_ms(sequences: int) -> dict[str, float]:
    """Schedule and apply, by themselves and with all else that the engine's loop does."""
    engine = decoding(sequences)
    scheduler, runner = engine.scheduler, engine.runner
    schedules, applies, plans = [], [], []
    for _ in range(STEPS):
        schedules.append(timed(lambda: plans.append(scheduler.schedule())))
        runner.launch(plans[-1])
        result = runner.collect()
        applies.append(timed(lambda: scheduler.apply(result)))  # noqa: B023
    loop = [timed(engine.step) for _ in range(STEPS)]
    return {
        "schedule + apply, ms": 1e3 * (statistics.median(schedules) + statistics.median(applies)),
        "schedule, ms": 1e3 * statistics.median(schedules),
        "apply, ms": 1e3 * statistics.median(applies),
        "engine loop, tokens/s": sequences / statistics.median(loop),
        "plan on the wire, bytes": float(len(_packed(plans[-1]))),
    }


def _packed(plan: object) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(plan)


def blocked_head_ms() -> float:
    """A step of one sequence while the head of the queue, all of it cached, waits for room."""
    from phalanx.engine.sampling import SamplingParams

    engine = engine_of(8, blocks=CACHED_TOKENS // 16 + 64, longest=CACHED_TOKENS + 256)
    prompt = [index % 9000 for index in range(CACHED_TOKENS)]
    engine.add(prompt, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    engine.add([5] * 2048, SamplingParams(max_tokens=3000))
    engine.step()
    engine.add(prompt, SamplingParams(max_tokens=2))
    return 1e3 * statistics.median(timed(engine.step) for _ in range(20))


class Toy:
    """A grammar that comes back to the same few masks, as one within strings does."""

    finished = False

    def __init__(self, number: int) -> None:
        free = (1 << VOCAB) - 1 - (1 << 2)
        states = [free, free - (1 << 34), 1 << 5, (1 << 5) | (1 << 77), free]
        self._masks = [state.to_bytes(VOCAB // 8, "little") for state in states]
        self._at = number

    def mask(self) -> bytes:
        return self._masks[self._at % len(self._masks)]

    def accept(self, token: int) -> None:
        self._at += 1


def grammar_step() -> dict[str, float]:
    """Scheduling rows under a grammar, and what each rank is sent for it."""
    from phalanx.engine.sampling import SamplingParams

    engine = engine_of(ROWS_UNDER_A_GRAMMAR, blocks=4096)
    for number in range(ROWS_UNDER_A_GRAMMAR):
        engine.add([number + 1] * 20, SamplingParams(max_tokens=300), matcher=Toy(number))
    sizes, times = [], []
    for _ in range(STEPS):
        plans: list[object] = []
        times.append(timed(lambda: plans.append(engine.scheduler.schedule())))  # noqa: B023
        times[-1] += timed(lambda: sizes.append(len(_packed(plans[0]))))  # noqa: B023
        engine.runner.launch(plans[0])
        engine.scheduler.apply(engine.runner.collect())
    return {"schedule and pack, ms": 1e3 * statistics.median(times), "bytes": statistics.median(sizes)}


def penalties_ms() -> float:
    """What penalties add to a step of a model that has next to nothing to compute."""
    from phalanx.engine.sampling import SamplingParams
    from phalanx.runtime.config import EngineConfig
    from phalanx.runtime.start import start_engine

    def step(params: SamplingParams, folder: Path) -> float:
        config = EngineConfig(
            model=str(folder), load_format="dummy", device="cpu", max_num_seqs=PENALISED, max_model_len=1024
        )
        engine = start_engine(config, folder, lambda done, total: None)
        try:
            for number in range(PENALISED):
                engine.add([number + 1] * 400, params)
            while any(request.length - request.computed > 1 for request in engine.scheduler.requests.values()):
                engine.step()
            return statistics.median(timed(engine.step) for _ in range(STEPS // 4))
        finally:
            engine.close()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(TINY))
        plain = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, logit_bias={5: 0.5})
        asked = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
        penalised = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, logit_bias={5: 0.5}, **asked)
        return 1e3 * (step(penalised, folder) - step(plain, folder))


def measure() -> dict[str, float]:
    found: dict[str, float] = {}
    for sequences in (512, 1024):
        found |= {f"{sequences:,} sequences: {what}": value for what, value in step_ms(sequences).items()}
    found[f"step beside a blocked head of {CACHED_TOKENS:,} cached tokens, ms"] = blocked_head_ms()
    found |= {f"{ROWS_UNDER_A_GRAMMAR} rows under a grammar: {what}": value for what, value in grammar_step().items()}
    found[f"penalties of {PENALISED} rows, ms"] = penalties_ms()
    return found


def one_round(source: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one-round"]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def more_is_better(what: str) -> bool:
    return what.endswith("/s")


def best(what: str, rounds: list[dict[str, float]]) -> float:
    return (max if more_is_better(what) else min)(each[what] for each in rounds)


def gain(what: str, here: float, there: float) -> float:
    """How many times better it is here."""
    return here / there if more_is_better(what) else there / here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder with another checkout's `phalanx`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_round:
        print(json.dumps(measure()))
        return
    sources = [Path(__file__).resolve().parents[1] / "src"]
    if arguments.against is not None:
        sources.append(arguments.against.resolve())
    rounds = [[one_round(source) for source in sources] for _ in range(arguments.rounds)]
    by_source = list(zip(*rounds, strict=True))
    results = {what: [best(what, each) for each in by_source] for what in rounds[0][0]}
    table = Table("what", "here", *(["there", "gain"] if len(sources) > 1 else []))
    for what, values in results.items():
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3f}" for value in values]
        table.add_row(what, *shown, *([f"{gain(what, *values):.2f}"] if len(values) > 1 else []))
    Console().print(table)
    if arguments.json is not None:
        found = {what: dict(zip(("here", "there"), values, strict=False)) for what, values in results.items()}
        arguments.json.write_text(
            json.dumps({"date": date.today().isoformat(), "cores": os.cpu_count(), "results": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
