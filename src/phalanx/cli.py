"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx import __version__
from phalanx.errors import ConfigError, PhalanxError

app = typer.Typer(
    help="Plan, serve and prove tensor-parallel LLM deployments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_WIDE = 140
"""Columns that a table of errors needs."""

Model = Annotated[
    str | None, typer.Argument(help="Checkpoint folder, .gguf file or Hugging Face id. Default: SmolLM2-135M-Instruct.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Ranks to share the model.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _errors() -> Iterator[None]:
    """Errors Phalanx raises on purpose are told in two lines, without a traceback."""
    try:
        yield
    except PhalanxError as error:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error[/] {error.code}: ", end="")
        print(f"{error.found}\n{error.fix}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        print(f"error: this command needs {error.name}: pip install 'phalanx[serve]'", file=sys.stderr)
        raise typer.Exit(1) from None


def _show_version(shown: bool) -> None:
    if shown:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Plan, serve and prove tensor-parallel LLM deployments."""


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", "-c", help="A user message to answer.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as 1,2,3.")] = None,
    tp: Tp = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer one prompt and exit."""
    with _errors():
        if sum(given is not None for given in (prompt, chat, prompt_ids)) != 1:
            raise ConfigError("bad_option", "Give exactly one of --prompt, --chat, --prompt-ids.", "See --help.")
        from phalanx.engine.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        from phalanx.llm import LLM

        with LLM(model, tp=tp, max_model_len=max_model_len, dtype=dtype, load_format=load_format) as llm:
            if chat is not None:
                question: str | list[int] = llm.encode_chat([{"role": "user", "content": chat}])
            else:
                question = prompt if prompt is not None else _token_ids(prompt_ids or "")
            if as_json or llm.tokenizer is None:
                answer = llm.generate(question, params)
                print(json.dumps(_as_dict(answer)) if as_json else answer.token_ids)
            else:
                for piece in llm.stream(question, params):
                    print(piece, end="", flush=True)
                print()


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("bad_option", f"--prompt-ids is {text!r}.", "Write token ids as 1,2,3.") from None


def _as_dict(answer: Any) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt_token_ids),
        "cached_tokens": answer.cached_tokens,
    }


@bench.command()
def offline(
    model: Model = None,
    cases: Annotated[str, typer.Option(help="BATCHxINPUTxOUTPUT, several with commas.")] = "1x128x64,8x256x64",
    tp: Tp = 1,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the best counts.")] = 2,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write results to this file.")] = None,
) -> None:
    """Time fixed batches: prefill, time per output token, and their share of what the machine can do."""
    with _errors():
        from phalanx.bench.offline import run_cases

        run_cases(model, cases, tp, dtype, load_format, repeats, as_json)


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Catalog name, config.json, folder or Hugging Face id.")] = None,
    machine: Annotated[str, typer.Option(help="Such as 4xH100-SXM, 4xDGX-Spark, 2xRTX4090+1xRTX3090.")] = "",
    isl: Annotated[int, typer.Option(help="Input tokens of a request.")] = 1024,
    osl: Annotated[int, typer.Option(help="Output tokens of a request.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests at once, over the whole machine.")] = 32,
    slo: Annotated[str, typer.Option(help="Goals in ms, such as ttft:800,tpot:50.")] = "",
    engine: Annotated[str, typer.Option(help="phalanx, vllm, sglang, trtllm; several with commas.")] = "",
    tp: Annotated[str, typer.Option(help="TP degrees to consider, such as 2,4,8. Default: all.")] = "",
    number_format: Annotated[str, typer.Option("--format", help="bf16, fp8, awq, ...; several with commas.")] = "",
    kv_format: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    spread: Annotated[float, typer.Option(help="Lengths are this share shorter at most; 0: all alike.")] = 0.2,
    requests: Annotated[int | None, typer.Option(help="Requests to simulate. Default: ten a client.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, in place of --concurrency.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV or JSON lines of arrivals, in place of lengths.")] = None,
    shared_prefix: Annotated[int, typer.Option(help="First tokens that prompts of an agent share.")] = 0,
    agents: Annotated[int, typer.Option(help="Agents with a prefix each.")] = 1,
    electricity: Annotated[float, typer.Option(help="USD a kWh.")] = 0.12,
    years: Annotated[float, typer.Option(help="Years over which a purchase is written off.")] = 4.0,
    recipe: Annotated[str | None, typer.Option(help="Files to start it: shell, compose, systemd, k8s, ray.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the files of --recipe. Default: print them.")] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Predict every row of this CSV of measurements.")] = None,
    cross_validate: Annotated[int | None, typer.Option(help="With --evaluate: folds over whole series.")] = None,
    plot: Annotated[Path | None, typer.Option(help="With --evaluate: draw predicted against measured (PNG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Does it fit, which TP, how fast, what it costs, and how to start it. Needs neither torch nor a GPU."""
    with _errors():
        if evaluate is not None:
            _evaluate(evaluate, cross_validate, plot, as_json)
            return
        if model is None or not machine:
            missing = "model" if model is None else "machine"
            raise ConfigError(
                "bad_option", f"No {missing} is named.", "Such as: phalanx plan Llama-3.3-70B --machine 4xH100-SXM"
            )
        from phalanx.plan.ask import Question, answer

        answer(
            Question(
                model=model,
                machine=machine,
                input_tokens=isl,
                output_tokens=osl,
                concurrency=concurrency,
                slo=slo,
                engines=engine,
                tps=tp,
                formats=number_format,
                kv_format=kv_format,
                spread=spread,
                requests=requests,
                rate=rate,
                trace=trace,
                shared_prefix=shared_prefix,
                agents=agents,
                electricity=electricity,
                years=years,
            ),
            recipe=recipe,
            folder=output,
            as_json=as_json,
        )


def _evaluate(file: Path, folds: int | None, plot: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from phalanx.plan.evaluate import draw, evaluate

    report = evaluate(file, folds)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        Console(width=max(Console().width, _WIDE)).print(report.table())
    for problem, count in Counter(row.problem for row in report.unpredicted).items():
        print(f"{count} rows not predicted: {problem}", file=sys.stderr)
    if plot is not None:
        draw(report, plot)


if __name__ == "__main__":
    app()
