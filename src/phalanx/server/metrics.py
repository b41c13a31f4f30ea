"""Metrics for Prometheus."""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector

from phalanx.engine.speculation import SpeculationTotals
from phalanx.engine.step_plan import Totals
from phalanx.server.histogram import Histogram
from phalanx.server.messages import Books, Stepped
from phalanx.server.recent import Recent

if TYPE_CHECKING:
    from phalanx.server.answer import Answer

disable_created_metrics()

_PARTS = ("schedule", "launch", "device", "all_reduce", "sample")
_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
_FIRST_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class MetricSet:
    """Gauges and counters under one prefix. What both have is named as vLLM's dashboards expect it."""

    def __init__(self, registry: CollectorRegistry, prefix: str, model: str) -> None:
        labels, values = ["model_name", "engine"], [model, "0"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=registry).labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=registry).labels(*values)

        self.running = gauge("num_requests_running", "Requests in the batch.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for room in the batch.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.")
        self.preemptions = counter("num_preemptions", "Requests put back because KV blocks ran out.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            prefix + "request_success", "Answers by how they ended.", [*labels, "finished_reason"], registry=registry
        )
        self.drafts = counter("spec_decode_num_drafts", "Rows that held drafts.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafts that came true.")
        self._accepted_at = Counter(
            prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that came true, by their place in the row.",
            [*labels, "position"],
            registry=registry,
        )
        self._values = values

    def speculated(self, now: SpeculationTotals, last: SpeculationTotals) -> None:
        self.drafts.inc(now.drafts - last.drafts)
        self.draft_tokens.inc(now.draft_tokens - last.draft_tokens)
        self.accepted_tokens.inc(now.accepted_tokens - last.accepted_tokens)
        for position, (after, before) in enumerate(zip_longest(now.by_position, last.by_position, fillvalue=0)):
            self._accepted_at.labels(*self._values, str(position)).inc(after - before)

    def success(self, reason: str) -> Counter:
        return self._success.labels(*self._values, reason)


class Metrics:
    """Hears of steps and of answers; told twice under `vllm:` where dashboards made for vLLM are to go on working.

    Steps and tokens come by the ten thousand a second: of them it only keeps the sums until it is asked.
    """

    def __init__(self, model: str, vllm_names: bool) -> None:
        self._registry = CollectorRegistry()
        prefixes = ["phalanx:", *(["vllm:"] if vllm_names else [])]
        self._sets = [MetricSet(self._registry, prefix, model) for prefix in prefixes]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram([prefix + name for prefix in prefixes], text, model, buckets)
            self._registry.register(made)
            return made

        self.first_tokens = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_SECONDS)
        self.token_gaps = histogram("inter_token_latency_seconds", "Time between tokens.", _TOKEN_SECONDS)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first step.", _REQUEST_SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "First step to first token.", _REQUEST_SECONDS)
        self.decode_time = histogram("request_decode_time_seconds", "First to last token.", _REQUEST_SECONDS)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.request_output = histogram("request_generation_tokens", "Generated tokens a request.", _TOKENS)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        parts = Counter(
            "phalanx:step_seconds", "Seconds of steps by part.", ["model_name", "part"], registry=self._registry
        )
        self._parts = {part: parts.labels(model, part) for part in _PARTS}
        self._steps = Counter("phalanx:steps", "Steps run.", ["model_name"], registry=self._registry).labels(model)
        self._restarts, self._run_again = (
            Counter(f"phalanx:{name}", text, ["model_name"], registry=self._registry).labels(model)
            for name, text in (
                ("engine_restarts", "Engines started again after a death."),
                ("requests_run_again", "Requests without a token that were handed to the next engine."),
            )
        )
        self.recent = Recent()
        self._tokens = 0
        self._begin_books(num_blocks=1)

    def engine_started(self, num_blocks: int) -> None:
        """A new engine counts from zero, and nothing runs on it yet."""
        self._tell_steps()
        self._begin_books(num_blocks)
        self.recent.engine_started(num_blocks)

    def _begin_books(self, num_blocks: int) -> None:
        self._blocks = num_blocks
        self._told = self._books = Books(0, 0, num_blocks, 0, 0, 0, Totals())

    def engine_restarts(self, run_again: int) -> None:
        self._restarts.inc()
        self._run_again.inc(run_again)

    def stepped(self, report: Stepped) -> None:
        before, now = self._books.totals, report.books.totals
        if now.steps > before.steps:
            self.step_tokens.observe((now.tokens - before.tokens) / (now.steps - before.steps))
        self._books = report.books
        self._tokens += len(report.tokens)
        self.recent.stepped(report)

    def _tell_steps(self) -> None:
        """By how much counts have grown since they were last told, and how it is now."""
        books, last = self._books, self._told
        self._steps.inc(books.totals.steps - last.totals.steps)
        for part, counter in self._parts.items():
            counter.inc(getattr(books.totals, f"{part}_s") - getattr(last.totals, f"{part}_s"))
        for each in self._sets:
            each.running.set(books.running)
            each.waiting.set(books.waiting)
            each.kv_usage.set(1 - books.free_blocks / self._blocks)
            each.preemptions.inc(books.preemptions - last.preemptions)
            each.prefix_queries.inc(books.prefix_queries - last.prefix_queries)
            each.prefix_hits.inc(books.prefix_hits - last.prefix_hits)
            each.generation_tokens.inc(self._tokens)
            each.speculated(books.speculation, last.speculation)
        self._told, self._tokens = books, 0

    def first_token(self, after_s: float) -> None:
        self.first_tokens.observe(after_s)
        self.recent.first_token.append(after_s)

    def next_token(self, after_s: float) -> None:
        self.token_gaps.observe(after_s)
        self.recent.token_gap.append(after_s)

    def answered(self, answer: Answer) -> None:
        """An answer has ended, well or not."""
        self.request_prompt.observe(answer.prompt_tokens)
        self.request_output.observe(answer.output_tokens)
        self.whole.observe(time.perf_counter() - answer.arrived)
        for choice in answer.choices:
            if choice.first_at is not None and choice.last_at is not None:
                self.queue_time.observe(choice.queued_s)
                self.prefill_time.observe(max(choice.first_at - answer.arrived - choice.queued_s, 0.0))
                self.decode_time.observe(choice.last_at - choice.first_at)
        for each in self._sets:
            each.prompt_tokens.inc(answer.prompt_tokens)
            for choice in answer.choices:
                each.success(choice.finish_reason or "abort").inc()

    def add(self, collector: Collector) -> None:
        """Metrics that another part tells whenever it is asked."""
        self._registry.register(collector)

    def expose(self) -> bytes:
        self._tell_steps()
        return generate_latest(self._registry)
