"""Decode and prefill on this machine's CPUs, from one checkpoint: weights as stored and widened, beside llama.cpp.

    python benchmarks/cpu.py [MODEL.gguf] [--llama-cpp PYTHON]

MODEL is the default model where none is named. PYTHON is an interpreter that has llama-cpp-python; it takes turns with
Phalanx, so that what else the machine does hits both. Times are wall-clock; the fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch

from phalanx import LLM, SamplingParams
from phalanx.weights.checkpoint import locate

PROMPT, TOKENS, ROUNDS = 128, 64, 3
ROWS = (1, 8, 32)
_LLAMA = """
import json, sys, time
from llama_cpp import Llama
model, threads, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
llm = Llama(model, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
best = {}
for _ in range(3):
    llm.reset()
    begun = time.perf_counter()
    llm.eval([(7 * place) % 40000 + 5 for place in range(prompt)])
    filled = time.perf_counter()
    for place in range(tokens):
        llm.eval([place + 5])
    ended = time.perf_counter()
    for name, rate in (("prefill", prompt / (filled - begun)), ("1", tokens / (ended - filled))):
        best[name] = max(best.get(name, 0.0), rate)
print(json.dumps(best))
"""


def measured(model: Path, dtype: str) -> dict[str, float]:
    """Tokens a second: of prompts, and of answers at each number of rows."""
    best: dict[str, float] = {}
    decode = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(model, progress=False, dtype=dtype, device="cpu", prefix_caching=False, max_model_len=512) as llm:
        for _ in range(ROUNDS):
            for rows in ROWS:
                prompts = [[(7 * place + row) % 40000 + 5 for place in range(PROMPT)] for row in range(rows)]
                begun = time.perf_counter()
                llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
                filled = time.perf_counter()
                llm.generate([prompt[:2] for prompt in prompts], decode)
                ended = time.perf_counter()
                rates = {str(rows): rows * TOKENS / (ended - filled)}
                if rows == 1:
                    rates["prefill"] = PROMPT / (filled - begun)
                best |= {name: max(best.get(name, 0.0), rate) for name, rate in rates.items()}
    return best


def llama_cpp(python: str, model: Path) -> dict[str, float]:
    arguments = [str(number) for number in (torch.get_num_threads(), PROMPT, TOKENS)]
    ran = subprocess.run([python, "-c", _LLAMA, str(model), *arguments], capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    asked = parser.parse_args()
    model = locate(asked.model)
    found = {"as stored": measured(model, "auto"), "widened": measured(model, "fp32")}
    if asked.llama_cpp:
        found["llama.cpp"] = llama_cpp(asked.llama_cpp, model)
    columns = ["prefill", *map(str, ROWS)]
    print(f"{model.name}, {torch.get_num_threads()} threads, tokens a second (and as stored to it)")
    print("| | " + " | ".join(name if name == "prefill" else f"{name} rows" for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for title, rates in found.items():
        shown = (
            f"{rates[name]:.1f} ({found['as stored'][name] / rates[name]:.2f}x)" if name in rates else ""
            for name in columns
        )
        print(f"| {title} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
