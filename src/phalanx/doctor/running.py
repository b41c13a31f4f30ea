"""A running server as facts: what it says in /metrics over a few seconds, in Phalanx's words or vLLM's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec

from phalanx.doctor.facts import Serving
from phalanx.doctor.finding import Finding
from phalanx.engine.marks import StepTraces
from phalanx.errors import PhalanxError
from phalanx.trace.perfetto import records_of

_PATIENCE_S = 5.0
_TOLD_S = 30.0
_SAMPLE = re.compile(r"^(?:phalanx|vllm):([a-z_0-9]+)(?:\{[^}]*\})?\s+([0-9.eE+\-]+|NaN|[+-]Inf)\s*$")


class ServerError(PhalanxError):
    """The server did not tell what was asked of it."""


def read_server(
    url: str,
    seconds: float = 2.0,
    key: str | None = None,
    tp: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Serving:
    """Look twice, `seconds` apart. Rates are of that time; so are latencies, unless nothing was served then."""
    base = url.rstrip("/")
    model = _model(base, key)
    before, began = parse_metrics(_get(f"{base}/metrics", key)), time.monotonic()
    sleep(seconds)
    after, elapsed = parse_metrics(_get(f"{base}/metrics", key)), time.monotonic() - began
    if "num_requests_running" not in after:
        raise ServerError(
            "no_metrics", f"{base}/metrics has neither Phalanx's nor vLLM's names.", "Name another --url."
        )
    tokens = after.get("generation_tokens_total", 0.0) - before.get("generation_tokens_total", 0.0)
    ranks, deaths = _health(base, key)
    return Serving(
        model=model,
        tp=tp or ranks or 1,
        concurrency=(before.get("num_requests_running", 0.0) + after["num_requests_running"]) / 2,
        tokens_per_s=max(tokens, 0.0) / elapsed if elapsed > 0 else 0.0,
        tpot_ms=_mean_ms(before, after, "inter_token_latency_seconds", "time_per_output_token_seconds"),
        ttft_ms=_mean_ms(before, after, "time_to_first_token_seconds"),
        deaths=deaths,
    )


def fetch_trace(url: str, key: str | None, steps: int, seconds: float) -> StepTraces:
    """Some steps of a running Phalanx, over all its ranks."""
    address = f"{url.rstrip('/')}/trace"
    body = json.dumps({"steps": steps, "seconds": seconds}).encode()
    text = _get(address, key, body=body, patience_s=seconds + _PATIENCE_S + _TOLD_S)
    try:
        return records_of(text.encode())
    except msgspec.DecodeError as error:
        raise ServerError("bad_answer", f"{address} did not answer with a trace: {error}.", "Is it Phalanx?") from None


def fetch_notes(url: str, key: str | None) -> list[Finding]:
    """What a running Phalanx itself has to say of its last minute."""
    answer = _json(f"{url.rstrip('/')}/cockpit/notes", key)
    return msgspec.convert(answer, list[Finding])


def parse_metrics(text: str) -> dict[str, float]:
    """Samples by their name without prefix and labels, summed over labels; histograms' buckets are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        matched = _SAMPLE.match(line)
        if matched is None or matched[1].endswith("_bucket"):
            continue
        value = float(matched[2])
        if value == value:
            found[matched[1]] = found.get(matched[1], 0.0) + value
    return found


def _mean_ms(before: dict[str, float], after: dict[str, float], *names: str) -> float | None:
    for name in names:
        total, count = (after.get(f"{name}_{part}", 0.0) for part in ("sum", "count"))
        earlier_total, earlier_count = (before.get(f"{name}_{part}", 0.0) for part in ("sum", "count"))
        if count > earlier_count:
            return (total - earlier_total) / (count - earlier_count) * 1e3
        if count:
            return total / count * 1e3
    return None


def _model(base: str, key: str | None) -> str:
    answer = _json(f"{base}/v1/models", key)
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise ServerError("no_model", f"{base}/v1/models names no model.", "Name an OpenAI-compatible server.")
    return str(models[0]["id"])


def _health(base: str, key: str | None) -> tuple[int | None, tuple[str, ...]]:
    """How many ranks Phalanx says it has, and whether one is stuck; other servers do not say."""
    try:
        answer = _json(f"{base}/health", key, any_status=True)
    except ServerError:
        return None, ()
    if not isinstance(answer, dict) or not isinstance(answer.get("ranks"), list):
        return None, ()
    return len(answer["ranks"]) or None, ("rank_stuck",) if answer.get("status") == "stuck" else ()


def _json(url: str, key: str | None, any_status: bool = False) -> Any:
    text = _get(url, key, any_status)
    try:
        return json.loads(text)
    except ValueError:
        raise ServerError(
            "bad_answer", f"{url} did not answer with JSON.", "Name an OpenAI-compatible server."
        ) from None


_FIXES = {
    401: "Give its key with --api-key-file.",
    403: "Give the key of an administrator with --api-key-file.",
    503: "Ask again once its /ready says 200.",
}


def _reason(body: str) -> str:
    """What an OpenAI-compatible server says of an error, if it does."""
    try:
        return f" {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


def _get(
    url: str, key: str | None, any_status: bool = False, body: bytes | None = None, patience_s: float = _PATIENCE_S
) -> str:
    if not url.startswith(("http://", "https://")):
        raise ServerError("bad_url", f"{url} is no address.", "Such as http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        with urlopen(Request(url, body, headers), timeout=patience_s) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except HTTPError as error:
        told = error.read().decode("utf-8", "replace")
        if any_status:
            return told
        fix = _FIXES.get(error.code, "Check the address.")
        raise ServerError("server_refused", f"{url} answered {error.code}.{_reason(told)}", fix) from None
    except (URLError, TimeoutError, OSError) as error:
        raise ServerError("no_server", f"{url} does not answer ({error}).", "Start it, or check the address.") from None
