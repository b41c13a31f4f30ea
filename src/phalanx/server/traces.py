"""Traces for OpenTelemetry: a span a request, under vLLM's names. What it needs is imported when it is asked for."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phalanx.server.access_log import traceparent
from phalanx.server.errors import ApiError
from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.server.answer import Answer


class Traces:
    """Sends spans in batches from a thread of its own; a collector that is away costs nothing but its spans."""

    def __init__(self, endpoint: str, model: str) -> None:
        resource = Resource.create({"service.name": "phalanx", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("phalanx", __version__)
        self._model = model

    def answered(self, id: str, answer: Answer, error: ApiError | None) -> None:
        """Of a request that has ended, well or not; part of its client's trace if it told one."""
        ended = time.time_ns()
        took = time.perf_counter() - answer.arrived
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract({"traceparent": traceparent()}),
            kind=SpanKind.SERVER,
            attributes=self._attributes(id, answer) | {"gen_ai.latency.e2e": took},
            start_time=ended - int(took * 1e9),
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error.body["error"]["code"]))
        span.end(ended)

    def _attributes(self, id: str, answer: Answer) -> dict[str, str | int | float]:
        params = answer.questions[0].params
        told: dict[str, str | int | float] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": len(answer.choices),
            "gen_ai.usage.prompt_tokens": answer.prompt_tokens,
            "gen_ai.usage.completion_tokens": answer.output_tokens,
        }
        if params.max_tokens is not None:
            told["gen_ai.request.max_tokens"] = params.max_tokens
        first = min(answer.choices, key=lambda choice: choice.first_at or math.inf)
        if first.first_at is not None and first.last_at is not None:
            to_first = first.first_at - answer.arrived
            told |= {
                "gen_ai.latency.time_in_queue": first.queued_s,
                "gen_ai.latency.time_to_first_token": to_first,
                "gen_ai.latency.time_in_model_prefill": max(to_first - first.queued_s, 0.0),
                "gen_ai.latency.time_in_model_decode": first.last_at - first.first_at,
            }
        return told

    def close(self) -> None:
        """Send what is left; not for long if nobody takes it."""
        self._provider.force_flush(2000)
        self._provider.shutdown()
