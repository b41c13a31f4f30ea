"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phalanx import __version__
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import ConfigError, PhalanxError

app = typer.Typer(
    help="Plan, serve and prove tensor-parallel LLM deployments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")

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
def serve(
    model: Model = None,
    tp: Tp = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="A key clients must send; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients ask for. Default: MODEL.")] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence. Default: the model's.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.")] = 2048,
    kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes a rank for keys and values.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of common prefixes.")] = True,
    reasoning_parser: Annotated[str | None, typer.Option(help="Default: by model family; none for none.")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="Default: by model family; none for none.")] = None,
    max_queued_requests: Annotated[int, typer.Option(min=0, help="Beyond max-num-seqs; then 429.")] = 256,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 600.0,
    step_timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a step counts as hung.")] = 300.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds running requests get after SIGTERM.")] = 30.0,
    restart: Annotated[int, typer.Option(min=0, help="How often to restart an engine that died.")] = 0,
    max_body_size: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 4 * 2**20,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web origin that may call; may be repeated.")] = None,
    vllm_metrics: Annotated[bool, typer.Option(help="Expose metrics under vLLM's names too.")] = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    with _errors():
        from phalanx.runtime.config import EngineConfig
        from phalanx.server.options import ServeOptions
        from phalanx.server.serve import serve as run

        config = EngineConfig(
            model=model,
            tp=tp,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            prefix_caching=prefix_caching,
        )
        options = ServeOptions(
            host=host,
            port=port,
            api_keys=_api_keys(api_key or [], api_key_file),
            served_name=served_model_name,
            reasoning_parser=reasoning_parser,
            tool_parser=tool_call_parser,
            max_queued_requests=max_queued_requests,
            request_timeout_s=request_timeout,
            step_timeout_s=step_timeout,
            drain_timeout_s=drain_timeout,
            restarts=restart,
            max_body_bytes=max_body_size,
            tls_cert=tls_cert,
            tls_key=tls_key,
            cors_origins=tuple(cors_origin or ()),
            vllm_metrics=vllm_metrics,
        )
        raise typer.Exit(run(config, options))


def _api_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """Keys from flags and file. A key that is asked for but empty would open the server: refused."""
    try:
        lines = file.read_text().split() if file is not None else []
    except OSError as error:
        raise ConfigError("bad_option", f"--api-key-file {file}: {error.strerror}.", "Give a readable file.") from None
    keys = (*given, *lines)
    if any(not key.strip() for key in given) or (file is not None and not lines):
        raise ConfigError("bad_option", "An API key is empty.", "Give at least one character, or no key at all.")
    return keys


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
    with _errors():
        from phalanx.bench.serving.options import Options
        from phalanx.bench.serving.run import run

        if run(Options(**flags)).completed == 0:
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
