"""`phalanx serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import ConfigFile
from phalanx.cli.process_list import hide_from_process_list
from phalanx.cli.shared import (
    Dtype,
    ExecutorOption,
    Interface,
    KvCacheDtype,
    LoadFormat,
    Model,
    RanksPerNode,
    RayAddress,
    ShareGpus,
    StateDtype,
    Tp,
    told_errors,
)
from phalanx.engine import defaults
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.server.keys import KeyRing


def serve(
    model: Model = None,
    config_file: ConfigFile = None,
    tp: Tp = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key clients must send; may be repeated. Better: a file.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one key a line, its name and limits. SIGHUP reads it anew.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name clients ask for; may be repeated. Default: MODEL.")
    ] = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    state_dtype: StateDtype = "auto",
    load_format: LoadFormat = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence. Default: the model's.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch.")] = defaults.MAX_NUM_SEQS,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens in a step.")
    ] = defaults.MAX_NUM_BATCHED_TOKENS,
    kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes a rank for keys and values.")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Most of a GPU's memory to take. Default: 0.99; 0.85 where the system shares it."),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of common prefixes.")] = True,
    warm_up: Annotated[
        str, typer.Option(help="Before ready: full, quick (other CUDA graphs follow when idle) or off.")
    ] = "quick",
    speculate: Annotated[
        str, typer.Option(help="Guess tokens ahead, with the same answers: off, auto, ngram, mtp or a draft model.")
    ] = "off",
    speculate_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most guesses a request and step. Default: up to 8.")
    ] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Default: by model family; none for none.")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="Default: by model family; none for none.")] = None,
    max_queued_requests: Annotated[int, typer.Option(min=0, help="Beyond max-num-seqs; then 429.")] = 256,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 600.0,
    step_timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a step counts as hung.")] = 300.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds running requests get after SIGTERM.")] = 30.0,
    restart: Annotated[int, typer.Option(min=0, help="How often to restart an engine that died, in ten minutes.")] = 0,
    max_body_size: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 4 * 2**20,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web origin that may call; may be repeated.")] = None,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(help="A name this server is known by, if it has no key; may be repeated.")
    ] = None,
    share_prefixes: Annotated[bool, typer.Option(help="Let all keys share cached prefixes.")] = False,
    vllm_metrics: Annotated[bool, typer.Option(help="Expose metrics under vLLM's names too.")] = False,
    response_store: Annotated[
        Path | None, typer.Option(help="A file for what /v1/responses keeps. Default: memory.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="A port for probes and metrics alone, without key or TLS.")
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin port. Default: --host.")] = None,
    open_probes: Annotated[
        bool, typer.Option("--open-probes", help="Ask no key for /ready, /health and /metrics.")
    ] = False,
    log_format: Annotated[str, typer.Option(help="text, or json: an object a line.")] = "text",
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry traces there, such as http://localhost:4318/v1/traces.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of a LoRA adapter in PEFT's form; may be repeated.")
    ] = None,
    lora_memory: Annotated[
        int, typer.Option(min=0, help="Bytes a rank for adapters, those loaded later included.")
    ] = 0,
    pooling: Annotated[
        str | None, typer.Option(help="Of embeddings: mean or last. Default: as the model's files say, or last.")
    ] = None,
    executor: ExecutorOption = "local",
    ranks_per_node: RanksPerNode = None,
    interface: Interface = None,
    ray_address: RayAddress = None,
    share_gpus: ShareGpus = False,
    invariant: Annotated[bool, typer.Option(help="The same bits at every TP and in every batch.")] = False,
    canary: Annotated[bool, typer.Option(help="Compare ranks' bits every step, and watch their weights.")] = True,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    with told_errors():
        from phalanx.runtime.config import EngineConfig
        from phalanx.server.options import ServeOptions
        from phalanx.web.serve import serve as run

        config = EngineConfig(
            model=model,
            tp=tp,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            state_dtype=state_dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            warm_up=warm_up,
            speculate=speculate,
            speculate_tokens=speculate_tokens,
            executor=executor,
            ranks_per_node=ranks_per_node,
            interface=interface,
            ray_address=ray_address,
            share_gpus=share_gpus,
            canary=canary,
            invariant=invariant,
            lora=_adapters(lora or []),
            lora_memory=lora_memory,
        )
        options = ServeOptions(
            host=host,
            port=port,
            keys=_keys(api_key or [], api_key_file),
            served_names=tuple(served_model_name or ()),
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
            allowed_hosts=tuple(allowed_hosts or ()),
            share_prefixes=share_prefixes,
            vllm_metrics=vllm_metrics,
            response_store=response_store,
            pooling=pooling,
            admin_host=admin_host,
            admin_port=admin_port,
            open_probes=open_probes,
            log_format=log_format,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
        raise typer.Exit(run(config, options))


def _keys(given: list[str], file: Path | None) -> KeyRing:
    from phalanx.server.keys import KeyRing

    hide_from_process_list(given)
    return KeyRing(given, file)


def _adapters(given: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for each in given:
        name, _, folder = each.partition("=")
        if not name or not folder or name in adapters:
            raise ConfigError("bad_option", f"--lora {each}.", "Give NAME=PATH, each name once.")
        adapters[name] = str(Path(folder).expanduser().resolve())
    return adapters
