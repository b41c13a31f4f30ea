"""`phalanx bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.shared import (
    Dtype,
    ExecutorOption,
    Interface,
    KvCacheDtype,
    LoadFormat,
    Model,
    RanksPerNode,
    RayAddress,
    StateDtype,
    Tp,
    told_errors,
)

bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.command()
def offline(
    model: Model = None,
    cases: Annotated[str, typer.Option(help="BATCHxINPUTxOUTPUT, several with commas.")] = "1x128x64,8x256x64",
    tp: Tp = 1,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    state_dtype: StateDtype = "auto",
    load_format: LoadFormat = "auto",
    executor: ExecutorOption = "local",
    ranks_per_node: RanksPerNode = None,
    interface: Interface = None,
    ray_address: RayAddress = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the best counts.")] = 2,
    emulate_tp: Annotated[
        str | None, typer.Option(help="Time one rank of these TP degrees on this device, such as 1,2,4,8.")
    ] = None,
    all_reduce_us: Annotated[float | None, typer.Option(help="With --emulate-tp: what each all-reduce takes.")] = None,
    machine: Annotated[str | None, typer.Option(help="With --emulate-tp: the GPU whose fabric to model.")] = None,
    speculate: Annotated[str, typer.Option(help="With drafts too: mtp, ngram or a draft model.")] = "off",
    speculate_tokens: Annotated[int | None, typer.Option(min=1, help="Most drafts a request and step.")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="With --speculate: how often a draft is made to come true, such as 0.8.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write results to this file.")] = None,
) -> None:
    """Time fixed batches: prefill, time per output token, and their share of what the machine can do."""
    with told_errors():
        from phalanx.bench.offline import run_cases
        from phalanx.runtime.config import EngineConfig

        config = EngineConfig(
            model=model,
            tp=tp,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            state_dtype=state_dtype,
            load_format=load_format,
            executor=executor,
            ranks_per_node=ranks_per_node,
            interface=interface,
            ray_address=ray_address,
            speculate=speculate,
            speculate_tokens=speculate_tokens,
        )
        if emulate_tp is not None:
            from phalanx.bench.emulate import emulate

            emulate(config, cases, emulate_tp, all_reduce_us, machine, repeats, as_json, acceptance)
            return
        run_cases(config, cases, repeats, as_json, acceptance)


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first the server names.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    dataset: Annotated[str, typer.Option(help="random, sharegpt or shared-prefix.")] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="The ShareGPT file.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request's own.")] = 1024,
    output_len: Annotated[
        int | None, typer.Option(help="Answer tokens. Default: 128; sharegpt: as in the file.")
    ] = None,
    range_ratio: Annotated[float, typer.Option(help="Lengths are uniform from this share of them up.")] = 1.0,
    prefix_len: Annotated[
        int, typer.Option(help="shared-prefix: tokens of the system prompt all agents share.")
    ] = 1024,
    agents: Annotated[int, typer.Option(help="shared-prefix: each sends its requests one after the other.")] = 8,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests to measure. Default: 100, or 10 x --max-concurrency.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before that, not counted.")] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests/s; inf sends all at once.")] = float("inf"),
    arrival: Annotated[str | None, typer.Option(help="poisson (default), gamma or constant.")] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of gamma arrivals: 1 is Poisson, less comes in bursts.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests in flight.")] = None,
    goodput: Annotated[str | None, typer.Option(help="Bounds in ms on ttft, tpot, e2el, as ttft:800,tpot:50.")] = None,
    percentiles: Annotated[str, typer.Option()] = "50,95,99",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly the length asked for.")] = True,
    extra_body: Annotated[str | None, typer.Option(help="More fields of each request, as JSON.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key; other users can see it in `ps`.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 3600.0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the model's tokenizer.json.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Default: from the tokenizer, or the server.")] = None,
    gpus: Annotated[int, typer.Option(help="How many the server uses, for tok/s per GPU.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--save-plot", help="Draw the latencies into this PNG.")] = None,
) -> None:
    """Put load on a server: TTFT, TPOT, ITL, E2E, tokens/s and goodput."""
    flags = dict(locals())
    with told_errors():
        from phalanx.bench.serving.options import Options
        from phalanx.bench.serving.run import run

        if run(Options(**flags)).completed == 0:
            raise typer.Exit(1)
