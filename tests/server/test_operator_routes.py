"""What an operator asks: liveness, health, metrics, version, tokens; and the schema, tried by schemathesis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families

from phalanx import __version__
from tests.server.running import Server

if TYPE_CHECKING:
    import schemathesis

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

TEXT = "Grüße from the 🌍!"


@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_request_that_fits_or_breaks_the_schema_breaks_the_server(server: Server, kind: str) -> None:
    """Answers of many tokens would only take time: what may be long is kept short."""
    import schemathesis
    from schemathesis import GenerationMode

    mode = GenerationMode(kind)
    for found in schemathesis.openapi.from_url(server.url + "/openapi.json").get_all_operations():

        @settings(
            max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
        )
        @given(case=found.ok().as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and mode == GenerationMode.POSITIVE and case.path.startswith("/v1/"):
                case.body.pop("n", None)
                limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
                case.body |= {limit: 2, "min_tokens": 0}
            answer = case.call(timeout=60)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        try:
            call()
        except Unsatisfiable:
            assert mode == GenerationMode.NEGATIVE


def test_live_ready_version(server: Server) -> None:
    with server.client() as client:
        assert client.get("/live").json() == {"status": "live"}
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.get("/version").json() == {"version": __version__}
    assert "loading tiny, TP=2" in server.text


def test_health_names_every_rank_with_the_age_of_its_sign(server: Server) -> None:
    answer = server.health()
    assert answer.status_code == 200
    ranks = answer.json()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(0 <= rank["beat_age_s"] < 5 and not rank["stuck"] for rank in ranks)


def test_tokens_of_text_and_back(server: Server) -> None:
    with server.client() as client:
        tokens = client.post("/tokenize", json={"prompt": TEXT}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == 512
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": TEXT}
        chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": TEXT}]}).json()
        text = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        assert text == f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def metrics(server: Server) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name}{sample.labels.get('part', sample.labels.get('finished_reason', ''))}": sample.value
            for sample in samples if "le" not in sample.labels}  # fmt: skip


def test_metrics_count_what_was_asked_and_answered(server: Server) -> None:
    before = metrics(server)
    body = {"prompt": list(range(3, 43)), "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    after = metrics(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["phalanx:generation_tokens_total"] == 14
    assert grown["phalanx:prompt_tokens_total"] == 80
    assert grown["phalanx:prefix_cache_queries_total"] == 80
    assert grown["phalanx:prefix_cache_hits_total"] >= 32
    assert grown["phalanx:request_success_totallength"] == 2
    assert grown["phalanx:time_to_first_token_seconds_count"] == 2
    assert grown["phalanx:inter_token_latency_seconds_count"] == 12
    assert grown["phalanx:e2e_request_latency_seconds_count"] == 2
    assert grown["phalanx:steps_total"] >= 14
    assert grown["phalanx:iteration_tokens_total_count"] == grown["phalanx:steps_total"]
    parts = {
        part: grown[f"phalanx:step_seconds_total{part}"] for part in ("schedule", "launch", "device", "all_reduce")
    }
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert grown["phalanx:step_seconds_totalsample"] > 0
    assert sum(parts.values()) < grown["phalanx:e2e_request_latency_seconds_sum"]
    assert after["phalanx:num_requests_running"] == after["phalanx:num_requests_waiting"] == 0
    assert after["phalanx:kv_cache_usage_perc"] == 0
    assert not [name for name in after if name.startswith("vllm:")]
