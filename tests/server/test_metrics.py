"""What Prometheus is told of steps and answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.engine.core import Totals
from phalanx.server.messages import Books, NewToken, Stepped
from phalanx.server.metrics import Metrics


def told(metrics: Metrics) -> dict[str, float]:
    """Every sample but the buckets, by name and its own label."""
    families = text_string_to_metric_families(metrics.expose().decode())
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {
        sample.name + sample.labels.get("part", sample.labels.get("finished_reason", "")): sample.value
        for sample in samples
    }


def step(metrics: Metrics, tokens: int = 1, **books: Any) -> None:
    counts = {"running": 1, "waiting": 0, "free_blocks": 8, "preemptions": 0, "prefix_queries": 0, "prefix_hits": 0}
    new = [NewToken(1, 5, None, 0, 0.0)] * tokens
    metrics.stepped(Stepped(new, Books(**({"totals": Totals()} | counts | books))))


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics("tiny", vllm_names=False)
    made.engine_started(num_blocks=8)
    return made


def test_a_step_is_told_as_counts_by_how_much_they_grew(metrics: Metrics) -> None:
    step(
        metrics,
        2,
        preemptions=1,
        prefix_queries=40,
        prefix_hits=32,
        totals=Totals(steps=1, prompt_tokens=40, schedule_s=1, launch_s=2, device_s=3, all_reduce_s=4, sample_s=5),
    )
    step(
        metrics,
        3,
        preemptions=1,
        prefix_queries=50,
        prefix_hits=32,
        totals=Totals(steps=3, prompt_tokens=46, schedule_s=2, launch_s=4, device_s=6, all_reduce_s=8, sample_s=10),
    )
    after = told(metrics)
    assert after["phalanx:generation_tokens_total"] == 5
    assert after["phalanx:num_preemptions_total"] == 1
    assert after["phalanx:prefix_cache_queries_total"] == 50
    assert after["phalanx:prefix_cache_hits_total"] == 32
    assert after["phalanx:steps_total"] == 3
    parts = ("schedule", "launch", "device", "all_reduce", "sample")
    assert [after[f"phalanx:step_seconds_total{part}"] for part in parts] == [2, 4, 6, 8, 10]
    assert after["phalanx:iteration_tokens_total_sum"] == 40 + 6 / 2
    assert after["phalanx:iteration_tokens_total_count"] == 2


def test_gauges_tell_how_it_is_now(metrics: Metrics) -> None:
    step(metrics, running=3, waiting=2, free_blocks=2)
    after = told(metrics)
    assert after["phalanx:num_requests_running"] == 3
    assert after["phalanx:num_requests_waiting"] == 2
    assert after["phalanx:kv_cache_usage_perc"] == 0.75
    step(metrics, running=0, free_blocks=8)
    assert told(metrics)["phalanx:kv_cache_usage_perc"] == 0


def test_books_without_a_step_are_no_step(metrics: Metrics) -> None:
    step(metrics, totals=Totals(steps=1, prompt_tokens=4))
    step(metrics, 0, totals=Totals(steps=1, prompt_tokens=4))
    assert told(metrics)["phalanx:iteration_tokens_total_count"] == 1


def test_after_a_restart_counts_go_on_and_gauges_are_empty(metrics: Metrics) -> None:
    step(
        metrics,
        2,
        running=4,
        waiting=1,
        free_blocks=0,
        prefix_queries=40,
        totals=Totals(steps=9, prompt_tokens=9, schedule_s=9, launch_s=9, device_s=9, all_reduce_s=9, sample_s=9),
    )
    metrics.engine_started(num_blocks=4)
    between = told(metrics)
    assert between["phalanx:num_requests_running"] == between["phalanx:num_requests_waiting"] == 0
    assert between["phalanx:kv_cache_usage_perc"] == 0
    assert between["phalanx:generation_tokens_total"] == 2
    step(
        metrics,
        1,
        free_blocks=2,
        prefix_queries=10,
        totals=Totals(steps=1, prompt_tokens=1, schedule_s=1, launch_s=1, device_s=1, all_reduce_s=1, sample_s=1),
    )
    after = told(metrics)
    assert after["phalanx:steps_total"] == 10
    assert after["phalanx:prefix_cache_queries_total"] == 50
    assert after["phalanx:kv_cache_usage_perc"] == 0.5


def test_what_was_not_told_before_a_restart_is_not_lost(metrics: Metrics) -> None:
    step(metrics, 2, prefix_hits=3, totals=Totals(steps=4))
    metrics.engine_started(num_blocks=8)
    step(metrics, 1, prefix_hits=1, totals=Totals(steps=1))
    for _ in range(2):
        after = told(metrics)
        assert after["phalanx:generation_tokens_total"] == 3
        assert after["phalanx:prefix_cache_hits_total"] == 4
        assert after["phalanx:steps_total"] == 5


def ended(*reasons: str | None) -> Any:
    """An answer of a prompt of 10 tokens; every choice with a reason had two tokens, 0.5 s apart, after 1 s queued."""
    choices = [
        SimpleNamespace(
            finish_reason=reason,
            first_at=3.0 if reason else None,
            last_at=3.5 if reason else None,
            queued_s=1.0,
        )
        for reason in reasons
    ]
    return SimpleNamespace(arrived=0.0, prompt_tokens=10, output_tokens=2 * len(reasons), choices=choices)


def test_an_answer_is_told_by_how_its_choices_ended(metrics: Metrics) -> None:
    metrics.answered(ended("stop", "length", None))
    after = told(metrics)
    assert after["phalanx:request_success_totalstop"] == 1
    assert after["phalanx:request_success_totallength"] == 1
    assert after["phalanx:request_success_totalabort"] == 1
    assert after["phalanx:prompt_tokens_total"] == after["phalanx:request_prompt_tokens_sum"] == 10
    assert after["phalanx:request_generation_tokens_sum"] == 6
    assert after["phalanx:e2e_request_latency_seconds_count"] == 1
    assert after["phalanx:request_queue_time_seconds_sum"] == 2.0
    assert after["phalanx:request_prefill_time_seconds_sum"] == 4.0
    assert after["phalanx:request_decode_time_seconds_sum"] == 1.0
    assert after["phalanx:request_decode_time_seconds_count"] == 2


def test_times_of_tokens_have_buckets_fine_enough_for_a_millisecond(metrics: Metrics) -> None:
    metrics.first_token(0.0015)
    metrics.next_token(0.0025)
    after = told(metrics)
    assert after["phalanx:time_to_first_token_seconds_sum"] == 0.0015
    assert after["phalanx:inter_token_latency_seconds_sum"] == 0.0025
    text = metrics.expose().decode()
    for name in ("time_to_first_token", "inter_token_latency"):
        buckets = [line for line in text.splitlines() if line.startswith(f"phalanx:{name}_seconds_bucket")]
        assert [float(line.split()[-1]) for line in buckets][:3] in ([0, 1, 1], [0, 0, 1])


def test_dashboards_made_for_vllm_find_the_same_under_their_names() -> None:
    both = Metrics("tiny", vllm_names=True)
    both.engine_started(8)
    step(both, 2)
    both.answered(ended("stop"))
    both.first_token(0.1)
    after = told(both)
    ours = {name.removeprefix("phalanx:"): value for name, value in after.items() if name.startswith("phalanx:")}
    theirs = {name.removeprefix("vllm:"): value for name, value in after.items() if name.startswith("vllm:")}
    own = ("step", "engine_restarts", "requests_run_again")
    assert set(theirs) == {name for name in ours if not name.startswith(own)}
    times = {name for name in theirs if "e2e" in name}
    assert {name: ours[name] for name in theirs if name not in times} == {
        name: value for name, value in theirs.items() if name not in times
    }
    assert 'model_name="tiny"' in both.expose().decode()
