"""Phalanx beside other engines on this machine: the same weights, the same prompts, float32, greedy, in one run.

    python benchmarks/peers.py                                        # beside transformers
    python benchmarks/peers.py --vllm-python /path/to/venv/bin/python # and vLLM's CPU build from its own environment

Every engine lives in a process of its own and waits while another one is measured; the rounds alternate, and the best
of them counts, so that noise on a shared machine hits all alike. TPOT is (time of the whole run - time of the same run
with one output token) / (outputs - 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], int], None]
"""Continue these prompts by that many tokens each."""


def phalanx_engine(folder: str, longest: int, batch: int) -> Run:
    from phalanx import LLM, SamplingParams

    llm = LLM(folder, progress=False, prefix_caching=False, max_model_len=longest, max_num_seqs=batch)

    def run(prompts: list[list[int]], outputs: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs))

    return run


def transformers_engine(folder: str, longest: int, batch: int) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], outputs: int) -> None:
        ids = torch.tensor(prompts)
        length = {"max_new_tokens": outputs, "min_new_tokens": outputs}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)

    return run


def vllm_engine(folder: str, longest: int, batch: int) -> Run:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=batch,
    )

    def run(prompts: list[list[int]], outputs: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return run


ENGINES = {"phalanx": phalanx_engine, "transformers": transformers_engine, "vllm": vllm_engine}


def serve(name: str, folder: str, longest: int, batch: int) -> None:
    """A child process: reads cases from standard input, answers with seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    run = ENGINES[name](folder, longest, batch)
    run([[1, 2, 3]], 2)
    print(json.dumps(time.perf_counter() - began), file=answers)
    for line in sys.stdin:
        prompts, outputs = json.loads(line)
        start = time.perf_counter()
        run(prompts, outputs)
        print(json.dumps(time.perf_counter() - start), file=answers)


class Child:
    """An engine in its own process."""

    def __init__(self, name: str, python: str, folder: str, longest: int, batch: int) -> None:
        self.name = name
        command = [python, __file__, "--serve", name, "--folder", folder, "--sizes", f"{longest},{batch}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.start_s = self._answer()

    def time(self, prompts: list[list[int]], outputs: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([prompts, outputs]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} ended early (status {self._process.wait()}); run it alone with --serve to see why"
            )
        return float(json.loads(line))

    def close(self) -> None:
        self._process.communicate(timeout=60)


def export_model(model: Path, folder: Path) -> None:
    """A Llama as a Hugging Face folder in float32, which every engine can read."""
    import torch
    from safetensors.torch import save_file

    from phalanx.weights.checkpoint import Checkpoint

    checkpoint = Checkpoint(model)
    spec, reader = checkpoint.spec, checkpoint.open_reader(torch.device("cpu"))
    whole = {name: tuple(slice(0, size) for size in tensor.shape) for name, tensor in spec.tensors.items()}
    save_file({name: reader.read(name, slices) for name, slices in whole.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": next(iter(spec.ropes)).theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": str(torch.float32).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(children: list[Child], cases: list[tuple[int, int, int]], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for batch, inputs, outputs in cases:
        times: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds):
            rng = random.Random(number)
            prompts = [[rng.randrange(1000, 40000) for _ in range(inputs)] for _ in range(batch)]
            for child in children:
                for length in (1, outputs):
                    times.setdefault((child.name, length), []).append(child.time(prompts, length))
                print(f"  {batch}x{inputs}x{outputs} round {number + 1}: {child.name}", file=sys.stderr)
        for child in children:
            first, whole = min(times[child.name, 1]), min(times[child.name, outputs])
            tpot = (whole - first) / (outputs - 1)
            rows.append(
                {
                    "engine": child.name,
                    "case": f"{batch}x{inputs}x{outputs}",
                    "prefill_tok_s": batch * inputs / first,
                    "tpot_ms": tpot * 1e3,
                    "decode_tok_s": batch / tpot,
                    "output_tok_s": batch * outputs / whole,
                }
            )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    ours = {row["case"]: row for row in rows if row["engine"] == "phalanx"}
    print("| case | engine | prefill tok/s | TPOT ms | decode tok/s | output tok/s | Phalanx is ahead in decode by |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ahead = ours[row["case"]]["decode_tok_s"] / row["decode_tok_s"]
        print(
            f"| {row['case']} | {row['engine']} | {row['prefill_tok_s']:.0f} | {row['tpot_ms']:.1f} "
            f"| {row['decode_tok_s']:.1f} | {row['output_tok_s']:.1f} | {ahead:.2f}x |"
        )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases, engines = (
        list(dict.fromkeys(row["case"] for row in rows)),
        list(dict.fromkeys(row["engine"] for row in rows)),
    )
    colours = {"phalanx": "#c2410c", "vllm": "#64748b", "transformers": "#cbd5e1"}
    figure, axes = pyplot.subplots(1, len(cases), figsize=(3.2 * len(cases), 3.2), constrained_layout=True)
    for axis, case in zip(axes if len(cases) > 1 else [axes], cases, strict=True):
        values = [row["decode_tok_s"] for row in rows if row["case"] == case]
        bars = axis.bar(engines, values, color=[colours[engine] for engine in engines])
        axis.bar_label(bars, fmt="%.0f")
        axis.set_title(f"batch {case.split('x')[0]}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.supylabel("decode tok/s")
    figure.suptitle("SmolLM2-135M, float32, one CPU")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1x128x64,8x128x64,32x128x64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="python of an environment that has vllm-cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, *map(int, options.sizes.split(",")))
        return
    from phalanx.weights.checkpoint import locate

    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")]
    longest, batch = max(case[1] + case[2] for case in cases), max(case[0] for case in cases)
    pythons = {"phalanx": sys.executable, "transformers": sys.executable}
    if options.vllm_python:
        pythons["vllm"] = options.vllm_python
    with tempfile.TemporaryDirectory() as folder:
        export_model(locate(None), Path(folder))
        children = [Child(name, python, folder, longest, batch) for name, python in pythons.items()]
        rows = measure(children, cases, options.rounds)
        for child in children:
            child.close()
    print_table(rows)
    starts = {child.name: round(child.start_s, 1) for child in children}
    print("\nSeconds to start, first tokens included:", ", ".join(f"{name} {took}" for name, took in starts.items()))
    if options.json:
        record = {"date": date.today().isoformat(), "cores": os.cpu_count(), "start_s": starts, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
