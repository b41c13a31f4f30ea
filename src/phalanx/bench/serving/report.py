"""A run's results, as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from phalanx.bench.serving.measure import LoadSummary, Spread
from phalanx.bench.serving.options import Options
from phalanx.version import __version__

_FORMULAS = {
    "ttft": ("TTFT", "first chunk with text - sent"),
    "tpot": ("TPOT", "(E2E - TTFT) / (output tokens - 1), per request"),
    "itl": ("ITL", "gaps between chunks with text, pooled"),
    "e2el": ("E2E", "last chunk - sent"),
    "client_queue_time": ("wait", "sent - taken up by the client; in no other row"),
}
_SENT = "In ms. Sent: the client has a slot (--max-concurrency) and begins to send. Tokens are the server's count."


def tables(options: Options, model: str, summary: LoadSummary, notes: list[str]) -> Group:
    """All of it, ready to print."""
    parts: list[Any] = [_facts(options, model, summary), _latencies(options, summary)]
    if summary.failures:
        parts.append(_failures(summary))
    return Group(*parts, *(f"[dim]{escape(note)}[/]" for note in notes))


def _facts(options: Options, model: str, summary: LoadSummary) -> Table:
    table = Table(title=escape(f"{model} at {options.root}"), show_header=False, box=None, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    rate, cap = options.request_rate, options.max_concurrency
    offered = "all at once" if rate == math.inf else f"{rate:g} req/s ({_arrival(options)})"
    offered += "" if cap is None else f", at most {cap} at a time"
    output = summary.per_second(summary.output_tokens)
    total = summary.per_second(summary.input_tokens + summary.output_tokens)
    rows = {
        "requests": f"{summary.completed} ok, {summary.failed} failed, in {summary.duration:.2f} s",
        "offered": f"{options.dataset}, {offered}",
        "tokens": f"{summary.input_tokens:,} in, {summary.output_tokens:,} out",
        "requests/s": f"{summary.per_second(summary.completed):.2f}",
        "output tok/s": f"{output:,.1f}" + (f" ({output / options.gpus:,.1f} per GPU)" if options.gpus > 1 else ""),
        "total tok/s": f"{total:,.1f}",
    }
    if options.bounds:
        bounds = ", ".join(f"{name} <= {bound:g} ms" for name, bound in options.bounds.items())
        share = summary.good / summary.completed if summary.completed else 0.0
        rows["goodput"] = f"{summary.per_second(summary.good):.2f} req/s ({share:.0%} of those ok) with {bounds}"
    if summary.cached_tokens is not None:
        share = summary.cached_tokens / max(summary.input_tokens, 1)
        rows["cached"] = f"{summary.cached_tokens:,} prompt tokens ({share:.1%})"
    if any(summary.drafted):
        accepted, drafts = summary.drafted[0], sum(summary.drafted)
        rows["drafts"] = f"{accepted:,} of {drafts:,} came true ({accepted / drafts:.1%})"
    rows["client"] = f"at most {summary.max_client_delay * 1e3:.1f} ms behind its schedule"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _arrival(options: Options) -> str:
    if options.burstiness is not None:
        return f"gamma, burstiness {options.burstiness:g}"
    return options.arrival or "poisson"


def _latencies(options: Options, summary: LoadSummary) -> Table:
    table = Table(caption=_SENT, caption_justify="left")
    table.add_column()
    for name in ("mean", *(f"p{rank:g}" for rank in options.ranks)):
        table.add_column(name, justify="right")
    table.add_column("formula")
    for key in _shown(options):
        name, formula = _FORMULAS[key]
        spread = summary.latencies[key]
        values = ["-"] * (1 + len(options.ranks))
        if spread is not None:
            values = [f"{value:,.2f}" for value in (spread.mean, *spread.percentiles.values())]
        table.add_row(name, *values, formula)
    return table


def _shown(options: Options) -> list[str]:
    """The wait for a slot says something only where requests come at a rate: else all are due at once."""
    waits = options.request_rate < math.inf and (options.max_concurrency or options.dataset == "shared-prefix")
    return [key for key in _FORMULAS if waits or key != "client_queue_time"]


def _failures(summary: LoadSummary) -> Table:
    table = Table(title=f"{summary.failed} failed", title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("message")
    for message, count in summary.failures.items():
        table.add_row(str(count), escape(message))
    return table


def record(options: Options, model: str, summary: LoadSummary, notes: list[str]) -> dict[str, Any]:
    """The keys vLLM's benchmark writes, so that what reads those reads this, and some of Phalanx's own."""
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if options.endpoint == "chat" else "openai",
        "model_id": model,
        "tokenizer_id": model if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": options.requests,
        "request_rate": _finite(options.request_rate),
        "burstiness": _finite(options.gap_shape),
        "max_concurrency": options.max_concurrency,
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.per_second(summary.completed),
        "request_goodput": summary.per_second(summary.good) if options.bounds else None,
        "output_throughput": summary.per_second(summary.output_tokens),
        "total_token_throughput": summary.per_second(summary.input_tokens + summary.output_tokens),
    }
    for key in _shown(options):
        result |= _spread(key, summary.latencies[key], options.ranks)
    return result | {
        "output_throughput_per_gpu": summary.per_second(summary.output_tokens) / options.gpus,
        "gpus": options.gpus,
        "cached_tokens": summary.cached_tokens,
        "accepted_draft_tokens": summary.drafted[0],
        "rejected_draft_tokens": summary.drafted[1],
        "dataset": options.dataset,
        "arrival": _arrival(options),
        "goodput_bounds_ms": options.bounds,
        "max_client_delay_ms": summary.max_client_delay * 1e3,
        "failures": summary.failures,
        "notes": notes,
        "phalanx": __version__,
    }


def _finite(number: float) -> float | str:
    """JSON knows no infinity."""
    return "inf" if number == math.inf else number


def _spread(key: str, spread: Spread | None, ranks: tuple[float, ...]) -> dict[str, float | None]:
    if spread is None:
        names = ("mean", "median", "std", *(f"p{rank:g}" for rank in ranks))
        return {f"{name}_{key}_ms": None for name in names}
    percentiles = {f"p{rank:g}": value for rank, value in spread.percentiles.items()}
    values = {"mean": spread.mean, "median": spread.median, "std": spread.std, **percentiles}
    return {f"{name}_{key}_ms": value for name, value in values.items()}
