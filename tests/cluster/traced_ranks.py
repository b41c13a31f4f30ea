"""An engine of two ranks, each on a host of its own, without Ray: run on the first host, with the folder of a model,
the other host's namespace and both addresses. For every line that it reads it traces a batch of prompts, and prints it.
A line may name who sleeps meanwhile: this `rank` in every part of a layer, or the `host` before every step.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from phalanx.engine.core import Engine
from phalanx.engine.marks import StepTraces
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.tracing import EngineTracer
from phalanx.runtime import child, executor
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.messages import Meeting
from phalanx.runtime.start import start_engine
from phalanx.runtime.workers import LocalWorkers

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 4096,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
"""Little to compute, and much to send: 512 KiB for each sum of a step with two prompts."""
PROMPT, STEPS = 16, 4


def main() -> None:
    folder, namespace, *addresses = sys.argv[1:]

    class Apart(LocalWorkers):
        """The other rank in the other namespace, where only files and sockets in folders are shared."""

        def __init__(self, config: EngineConfig, model_path: Path) -> None:
            super().__init__(config, model_path)
            self.host, self.nodes = addresses[0], [f"host {address}" for address in addresses]

        def _meeting(self, rank: int) -> Meeting:
            return msgspec.structs.replace(super()._meeting(rank), host=addresses[rank])

    command = child.command
    child.command = lambda module: ["ip", "netns", "exec", namespace, *command(module)]
    executor.start_workers = Apart
    config = EngineConfig(
        tp=2, device="cpu", load_format="dummy", executor="ray", num_blocks=256, max_num_batched_tokens=2 * PROMPT
    )
    engine = start_engine(config, Path(folder), progress=lambda done, total: None)
    asleep = sleeping(engine)
    for number, line in enumerate(sys.stdin):
        asleep.clear()
        asleep.add(line.strip())
        print(msgspec.json.encode(traced(engine, number)).decode(), flush=True)
    engine.close()


def sleeping(engine: Engine) -> set[str]:
    """Put around what may sleep. Who is in the set does."""
    asleep = set[str]()

    def around(owner: Any, name: str, who: str, seconds: float) -> None:
        function = getattr(owner, name)

        def late(*given: Any) -> Any:
            time.sleep(seconds if who in asleep else 0)
            return function(*given)

        setattr(owner, name, late)

    for layer in engine.runner.runner.model.layers:  # type: ignore[attr-defined]
        around(layer.around_mixer, "enter", "rank", 0.02)
        around(layer.around_ffn, "enter", "rank", 0.02)
    around(engine.scheduler, "schedule", "host", 0.1)
    return asleep


def traced(engine: Engine, seed: int) -> StepTraces:
    rng, told = random.Random(seed), list[StepTraces]()
    for _ in range(2 * STEPS):
        prompt = [rng.randrange(engine.vocab) for _ in range(PROMPT)]
        engine.add(prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=1))
    EngineTracer(engine, STEPS, told.append)
    while not told:
        engine.step()
    return told[0]


if __name__ == "__main__":
    main()
