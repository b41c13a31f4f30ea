"""The H200 table: `python benchmarks/h200.py`. One process a model, random weights, one JSON line a case.

With `--checkpoints FOLDER`, a model that has a checkpoint there, in a folder of its name, is loaded from it.

A model of experts is timed a second time with one prompt for all requests, which then choose the same few experts.

Cases are BATCHxINPUTxOUTPUT; `256xmix` is 256 requests of 100 to 1024 tokens in and out. Everything is greedy and runs
to its length. TPOT is of the steps in which all requests decode, from the end of the last prompt to the first end of an
answer; the faster of two runs counts. Beside every speed stand the bytes or FLOPs a second it means, and their share of
what the machine gave in the same process to a large copy and a large product.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from h200_facts import GOALS, MIX, MODELS, VLLM

HERE = Path(__file__).parent
ALL = ("1x128x256", "32x1024x256", "128x1024x256", MIX)
CASES = {
    "qwen3-0.6b": ALL,
    "llama-3.1-8b": ALL,
    "llama-3.1-8b-fp8": ALL,
    "qwen3-30b-a3b-fp8": ALL,
    "llama-3.3-70b-tp4-shard": ALL[:2],
    "llama-3.3-70b-awq": ALL[:3],
    "gpt-oss-20b": ALL[:3],
    "gpt-oss-120b": ALL[:3],
    "glm-4.7-flash": ALL[:3],
    "deepseek-v3-fp8-tp8-rank": ALL[:3],
    "qwen3.5-35b-a3b-fp8": ALL[:3],
    "qwen3.5-27b-fp8": ALL[:3],
}


def mixed_lengths() -> list[tuple[int, int]]:
    rng = random.Random(1)
    return [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]


def measure(model: str, cases: list[str], began: float, checkpoint: Path) -> None:
    """Run in a process of its own: print a line for the start, one for the machine, one a case."""
    from phalanx.bench.ceilings import measure_ceilings
    from phalanx.bench.offline import least_work
    from phalanx.bench.timing import time_requests
    from phalanx.runtime.config import EngineConfig
    from phalanx.runtime.held import held_weights
    from phalanx.runtime.start import start_engine
    from phalanx.weights.checkpoint import Checkpoint

    stored = checkpoint.is_dir()
    folder = checkpoint if stored else Path(tempfile.mkdtemp())
    if not stored:
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
    tell = Teller(model, "checkpoint" if stored else "random")
    config = EngineConfig(
        load_format="auto" if stored else "dummy",
        max_num_seqs=256,
        max_num_batched_tokens=16384,
        max_model_len=4096,
        prefix_caching=False,
    )
    imported = time.time()
    engine = start_engine(config, folder, progress=lambda done, total: None)
    loaded = time.time()
    time_requests(engine, [(128, 1)], seed=0)
    now = time.time()
    parts = {"import_s": imported - began, "load_s": loaded - imported, "first_token_s": now - loaded}
    tell(metric="startup_s", value=round(now - began, 2), **{name: round(s, 2) for name, s in parts.items()})

    import torch

    gpu, source = torch.device("cuda", 0), Checkpoint(folder, config.load_format)
    spec, held = source.spec, held_weights(config, source, gpu)
    ceilings = measure_ceilings(gpu, torch.bfloat16, held.scheme)
    tell(
        metric="machine",
        **machine_facts(),
        tb_s=ceilings.bytes_per_s / 1e12,
        tflop_s=ceilings.flops_per_s / 1e12,
    )
    work = least_work(spec, held, config, gpu)
    for one_prompt in (False, True) if spec.moe is not None else (False,):
        for case in cases:
            tell(**(run_mix(engine, one_prompt) if case == MIX else run_case(engine, case, work, ceilings, one_prompt)))
    engine.close()


def run_case(engine: Any, name: str, work: Any, ceilings: Any, one_prompt: bool) -> dict[str, object]:
    from phalanx.bench.timing import FixedBatch, time_case, time_prompts

    case = FixedBatch.parse(name)
    timing = time_case(engine, case, repeats=2, one_prompt=one_prompt)
    tpot, prefill = timing.tpot, time_prompts(engine, case, repeats=2, one_prompt=one_prompt)
    moved, flops = work.bytes_of(case.decode_step), work.flops_of(case.decode_step)
    prefill_flops = work.flops_of(case.prompts)
    if one_prompt:  # how many experts that takes is not counted
        return {
            "case": name,
            "prompts": "one",
            "tpot_ms": round(tpot * 1e3, 3),
            "decode_tok_s": round(case.batch / tpot, 1),
        }
    return {
        "case": name,
        "prefill_s": round(prefill, 4),
        "prefill_tok_s": round(case.batch * case.inputs / prefill, 1),
        "prefill_tflop_s": round(prefill_flops / prefill / 1e12, 1),
        "prefill_share": round(prefill_flops / prefill / ceilings.flops_per_s, 3),
        "tpot_ms": round(tpot * 1e3, 3),
        "decode_tok_s": round(case.batch / tpot, 1),
        "decode_gb_s": round(moved / tpot / 1e9, 1),
        "decode_share": round(ceilings.seconds(moved, flops) / tpot, 3),
        "out_tok_s": round(case.batch * case.outputs / timing.whole, 1),
    }


def run_mix(engine: Any, one_prompt: bool) -> dict[str, object]:
    from phalanx.bench.timing import time_requests

    lengths = mixed_lengths()
    seconds = min(time_requests(engine, lengths, seed, one_prompt).whole for seed in range(2))
    outputs = sum(output for _, output in lengths)
    return {
        "case": MIX,
        **({"prompts": "one"} if one_prompt else {}),
        "seconds": round(seconds, 3),
        "out_tok_s": round(outputs / seconds, 1),
        "total_tok_s": round(sum(map(sum, lengths)) / seconds, 1),
    }


def machine_facts() -> dict[str, str]:
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return {"gpu": name, "driver": driver, "torch": torch.__version__, "triton": triton.__version__}


class Teller:
    """Prints a line of facts about a model."""

    def __init__(self, model: str, weights: str) -> None:
        from phalanx import __version__

        self._head = {"engine": f"phalanx {__version__}", "model": model, "weights": weights, "args": {}}

    def __call__(self, **facts: object) -> None:
        print(json.dumps(self._head | facts), flush=True)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return found.stdout.strip() or "unknown"


def run_models(models: list[str], cases: list[str] | None, checkpoints: Path, output: Path) -> list[dict[str, Any]]:
    """The first model is started twice: the first start of all, and one that finds everything in place."""
    lines: list[dict[str, Any]] = [
        {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()},
    ]
    with output.open("w") as file:
        file.write(json.dumps(lines[0]) + "\n")
        for model in models:
            wanted = [case for case in CASES[model] if cases is None or case in cases]
            for part in ([], wanted) if model == models[0] else (wanted,):
                options = ["--began", repr(time.time()), "--checkpoints", str(checkpoints), "--cases", *part]
                command = [sys.executable, __file__, "--child", model, *options]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                    assert child.stdout is not None
                    for line in child.stdout:
                        print(line, end="", flush=True)
                        file.write(line)
                        file.flush()
                        lines.append(json.loads(line))
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Phalanx beside vLLM and the goal, as Markdown."""
    rows = ["| model, case | Phalanx | of the limit | vLLM 0.24 | goal |", "|---|---|---|---|---|"]
    for line in lines:
        if "case" not in line:
            continue
        key = "out_tok_s" if line["case"] == MIX else "tpot_ms"
        peer = VLLM.get((line["model"], line["case"]), {})
        goal = GOALS.get((line["model"], line["case"]), "")
        unit = "tok/s" if key == "out_tok_s" else "ms"
        share = f"{line['decode_share']:.0%}" if "decode_share" in line else ""
        name = f"{line['model']}, {line['case']}" + (", one prompt" if "prompts" in line else "")
        rows.append(f"| {name} | {line[key]:,} {unit} | {share} | {peer.get(key)} | {goal} |")
        if "prefill_tok_s" in line:
            of_limit = f"{line['prefill_share']:.0%}"
            rows.append(
                f"| &nbsp; prefill | {line['prefill_tok_s']:,.0f} tok/s | {of_limit} | {peer.get('prefill_tok_s')} | |"
            )
    return "\n".join(rows)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """TPOT of Phalanx and vLLM beside the machine's limit, a panel for each batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ALL[:3]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.4 * len(names), 3.4), constrained_layout=True)
    for axis, name in zip(axes, names, strict=True):
        rows = [line for line in lines if line.get("case") == name and not ("prompts" in line and name == names[0])]
        rows = [line for line in rows if (line["model"], name) in VLLM]
        rows.sort(key=lambda line: (list(CASES).index(line["model"]), "prompts" in line))
        bars = {
            "Phalanx": [line["tpot_ms"] for line in rows],
            "vLLM 0.24": [VLLM[line["model"], name]["tpot_ms"] for line in rows],
            "limit": [line["tpot_ms"] * line.get("decode_share", 0) for line in rows],
        }
        for offset, (label, colour) in enumerate(zip(bars, ("#c2410c", "#64748b", "#cbd5e1"), strict=True)):
            places = [index + (offset - 1) * 0.27 for index in range(len(rows))]
            texts = [f"{value:.3g}" if value else "" for value in bars[label]]
            axis.bar_label(axis.bar(places, bars[label], 0.25, label=label, color=colour), texts, fontsize=6)
        axis.set_xticks(range(len(rows)), map(short_name, rows), fontsize=7)
        axis.set_title(name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ms a token")
    axes[0].legend(frameon=False)
    figure.suptitle("Decode on one H200, random weights")
    figure.savefig(path, dpi=150)


def short_name(line: dict[str, Any]) -> str:
    name = line["model"].replace("llama-", "").replace("qwen3-", "")
    return name.replace("-tp4-shard", "\nTP4").replace("-fp8", "\nFP8") + ("\none prompt" if "prompts" in line else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--cases", nargs="*", choices=ALL)
    parser.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints", help="where checkpoints may be")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "h200.jsonl")
    parser.add_argument("--plot", type=Path, help="draw what --output holds, and measure nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options.cases or [], options.began, options.checkpoints / options.child)
    elif options.plot:
        plot([json.loads(line) for line in options.output.read_text().splitlines()], options.plot)
    else:
        print(table(run_models(options.models, options.cases, options.checkpoints, options.output)))


if __name__ == "__main__":
    main()
