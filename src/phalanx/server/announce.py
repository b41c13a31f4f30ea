"""What a server says when it can be used."""

from __future__ import annotations

from phalanx.runtime.config import EngineConfig
from phalanx.server.messages import Started
from phalanx.server.options import ServeOptions
from phalanx.version import __version__

Address = tuple[str, int]


def url_of(scheme: str, address: Address) -> str:
    host, port = address
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def announcement(name: str, config: EngineConfig, options: ServeOptions, started: Started, address: Address) -> str:
    """Where it is, how much fits, who shares what, and a first request to copy."""
    url = url_of("https" if options.tls_cert else "http", address)
    key = " -H 'authorization: Bearer KEY'" if options.keys else ""
    cache = "FP8 KV cache" if config.kv_cache_dtype == "fp8" else "KV cache"
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    return (
        f"Phalanx {__version__} serves {name} at {url}/v1 (TP={config.tp}, "
        f"context {started.max_model_len}, {started.num_blocks * started.block_size} tokens of {cache})\n"
        f"Plan, watch and chat in the browser: {url}/\n"
        f"{_who_shares(options)}\n"
        f"  curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\\n    -d '{body}'\n"
    )


def _who_shares(options: ServeOptions) -> str:
    if not options.keys:
        return "No key is set: all who reach it share its cache of prefixes, and can tell what others have asked.\n"
    return "All keys share the cache of prefixes.\n" if options.share_prefixes else ""
