"""How to serve, apart from the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.server.keys import KeyRing

DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; the engine's own options are in EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: KeyRing = field(default_factory=KeyRing)
    served_names: tuple[str, ...] = ()
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    max_queued_requests: int = 256
    request_timeout_s: float = 600.0
    step_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0
    restarts: int = 0
    max_body_bytes: int = 4 * 2**20
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_prefixes: bool = False
    vllm_metrics: bool = False
    response_store: Path | None = None
    pooling: str | None = None
    admin_host: str | None = None
    admin_port: int | None = None
    open_probes: bool = False
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None


def default_name(model: str | None) -> str:
    """What clients call a model: its Hugging Face id, or the last part of its path."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model
