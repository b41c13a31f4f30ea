"""Every figure, from timelines small enough to compute by hand."""

from __future__ import annotations

import pytest

from phalanx.bench.serving.measure import RequestTrace, Spread, summarise

RANKS = (50.0, 99.0)


def trace(*text_at: float, sent: float = 10.0, ended: float | None = None, tokens: int | None = None) -> RequestTrace:
    """Sent at 10 s; text read at the times given."""
    return RequestTrace(
        due=sent,
        taken=sent,
        sent=sent,
        text_at=list(text_at),
        ended=text_at[-1] if ended is None else ended,
        prompt_tokens=7,
        output_tokens=len(text_at) if tokens is None else tokens,
    )


def test_one_request() -> None:
    request = trace(10.5, 10.6, 10.8)
    assert request.ttft == pytest.approx(0.5)
    assert request.e2el == pytest.approx(0.8)
    assert request.tpot == pytest.approx((0.8 - 0.5) / 2)


def test_several_tokens_in_a_chunk_count_as_the_server_counts_them() -> None:
    """Speculative decoding: three chunks, seven tokens."""
    request = trace(10.5, 10.6, 10.8, tokens=7)
    assert request.tokens == 7
    assert request.tpot == pytest.approx(0.3 / 6)
    summary = summarise([request], 1.0, {}, RANKS)
    assert summary.output_tokens == 7
    assert summary.latencies["itl"].mean == pytest.approx(150)


def test_without_usage_chunks_with_text_are_counted_and_the_summary_says_so() -> None:
    request = trace(10.5, 10.6, 10.8)
    request.output_tokens = None
    summary = summarise([request, trace(10.5)], 1.0, {}, RANKS)
    assert summary.output_tokens == 3 + 1
    assert summary.uncounted == 1


def test_latency_counts_from_sending_and_ends_with_the_last_chunk_of_the_answer() -> None:
    """Due at 8, taken up at 9, a slot at 10; the chunk that says why it ended comes after the last text."""
    request = RequestTrace(due=8.0, taken=9.0, sent=10.0, text_at=[10.5], ended=11.0, output_tokens=2)
    assert request.ttft == pytest.approx(0.5)
    assert request.e2el == pytest.approx(1.0)
    assert request.tpot == pytest.approx(0.5)
    summary = summarise([request], 3.0, {}, RANKS)
    assert summary.max_client_delay == pytest.approx(1.0)
    assert summary.latencies["client_queue_time"].mean == pytest.approx(1000)


def test_one_token_has_no_tpot_and_no_gap() -> None:
    summary = summarise([trace(10.5)], 1.0, {}, RANKS)
    assert summary.latencies["tpot"] is None
    assert summary.latencies["itl"] is None
    assert summary.latencies["ttft"].mean == pytest.approx(500)


def test_tokens_without_text_begin_when_the_answer_ends() -> None:
    request = trace(ended=10.4, tokens=2)
    assert request.ttft == request.e2el == pytest.approx(0.4)


def test_gaps_are_pooled_over_requests_and_never_span_two() -> None:
    """Gaps 0.1, 0.2 and 0.6: their mean is 300 ms, though the means of the requests are 150 and 600."""
    summary = summarise([trace(11.0, 11.1, 11.3), trace(20.0, 20.6)], 1.0, {}, RANKS)
    assert summary.latencies["itl"].mean == pytest.approx(300)
    assert summary.latencies["itl"].median == pytest.approx(200)
    tpot = summary.latencies["tpot"]
    assert tpot.mean == pytest.approx((150 + 600) / 2)


def test_a_spread_by_hand() -> None:
    """1, 2, 3, 4 s: percentiles lie on the straight line between neighbours, the deviation is the population's."""
    spread = Spread.of([4.0, 1.0, 3.0, 2.0], (25.0, 50.0, 99.0))
    assert spread.mean == spread.median == spread.percentiles[50.0] == pytest.approx(2500)
    assert spread.std == pytest.approx(1250**0.5 * 1000**0.5)
    assert spread.percentiles[25.0] == pytest.approx(1750)
    assert spread.percentiles[99.0] == pytest.approx(3970)
    assert Spread.of([], (50.0,)) is None


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({}, 3),
        ({"ttft": 500}, 2),
        ({"ttft": 499}, 1),
        ({"tpot": 150}, 2),
        ({"e2el": 800}, 2),
        ({"ttft": 500, "tpot": 150}, 1),
        ({"ttft": 1000, "tpot": 1000, "e2el": 299}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_bound(bounds: dict[str, float], good: int) -> None:
    """TTFT 500, 250, 700; TPOT 125, 500 and none (one token); E2E 750, 1250, 700: all exact in binary."""
    requests = [trace(10.5, 10.625, 10.75), trace(10.25, 11.25, tokens=3), trace(10.7)]
    assert summarise(requests, 2.0, bounds, RANKS).good == good


def test_failures_are_counted_apart_by_message_most_frequent_first() -> None:
    bad = [RequestTrace(due=0.0, error=message, text_at=[1.0], prompt_tokens=5) for message in ("a", "b", "b")]
    summary = summarise([*bad, trace(10.5, 10.7)], 2.0, {"ttft": 1e9}, RANKS)
    assert list(summary.failures.items()) == [("b", 2), ("a", 1)]
    assert (summary.completed, summary.failed, summary.good) == (1, 3, 1)
    assert (summary.input_tokens, summary.output_tokens) == (7, 2)
    assert summary.per_second(summary.output_tokens) == 1.0


def test_cached_tokens_are_unknown_unless_told() -> None:
    told, silent = trace(10.5), trace(10.5)
    assert summarise([silent], 1.0, {}, RANKS).cached_tokens is None
    told.cached_tokens = 4
    told.drafted = (3, 1)
    summary = summarise([silent, told, told], 1.0, {}, RANKS)
    assert (summary.cached_tokens, summary.drafted) == (8, (6, 2))


def test_nothing_at_all() -> None:
    summary = summarise([], 0.0, {"ttft": 1}, RANKS)
    assert (summary.completed, summary.failed, summary.per_second(5)) == (0, 0, 0.0)
