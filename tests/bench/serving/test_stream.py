"""An answer reads the same however its bytes are cut, and only text counts as text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.serving.measure import RequestTrace
from phalanx.bench.serving.stream import Frames, TraceWriter, error_message
from tests.bench.serving.conftest import DONE, delta, frame, text, usage


def read(*pieces: bytes) -> RequestTrace:
    """Piece number i is read at second i + 1, and the stream ends at second 100."""
    trace = RequestTrace(due=0.0, prompt_tokens=3)
    answer = TraceWriter(trace)
    for second, piece in enumerate(pieces, start=1):
        answer.feed(piece, float(second))
    answer.close(100.0)
    return trace


def events(pieces: Iterable[bytes]) -> list[bytes]:
    frames = Frames()
    return [event for piece in pieces for event in frames.feed(piece)]


@given(
    st.lists(st.sampled_from(["x", '{"a": 1}', "é中👍", "[DONE]", "data: y", ": z"]), max_size=6),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_frames_do_not_depend_on_where_the_bytes_are_cut(contents: list[str], end: bytes, cuts: list[int]) -> None:
    whole = b"".join(
        b": a comment" + end + b"id: 7" + end + b"data: " + content.encode() + end * 2 for content in contents
    )
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[a:b] for a, b in pairwise(places)]
    assert events(pieces) == [content.encode() for content in contents]
    assert events(bytes([byte]) for byte in whole) == [content.encode() for content in contents]


def test_lines_of_one_event_are_joined_and_the_blank_after_the_colon_is_optional() -> None:
    assert events([b"data:a\ndata:  b\n\ndata: c\n\n\n\n"]) == [b"a\n b", b"c"]


def test_an_event_is_out_with_its_empty_line_not_before() -> None:
    frames = Frames()
    assert list(frames.feed(b"data: a\n")) == []
    assert list(frames.feed(b"\n")) == [b"a"]


def test_a_large_event_in_small_pieces_is_read_in_linear_time() -> None:
    """Eight times the pieces take about eight times as long; joined anew for each, they would take 64 times."""

    def seconds(pieces: int) -> float:
        frames, start = Frames(), time.process_time()
        for _ in range(pieces):
            list(frames.feed(b"x"))
        list(frames.feed(b"\n\n"))
        return time.process_time() - start

    assert any(seconds(400_000) < 30 * max(seconds(50_000), 0.01) for _ in range(3))


def test_guesses_that_came_true_are_told_apart() -> None:
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    counted = frame(choices=[], usage={"completion_tokens": 3, "completion_tokens_details": details})
    assert read(text("a", "stop"), counted + DONE).drafted == (5, 2)


def test_a_completion() -> None:
    trace = read(text("a"), text("b") + text("c", "length"), usage(11, 3, cached=8) + DONE)
    assert trace.text_at == [1.0, 2.0, 2.0]
    assert trace.ended == 2.0
    assert (trace.prompt_tokens, trace.output_tokens, trace.cached_tokens) == (11, 3, 8)
    assert trace.error is None


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"index": 0}, {"function": {"arguments": "{"}}]},
    ],
)
def test_a_chunk_that_carries_text_begins_the_answer(fields: dict[str, Any]) -> None:
    assert read(delta(role="assistant", content=""), delta(**fields), delta("stop"), DONE).text_at == [2.0]


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"content": None, "reasoning": None, "tool_calls": None},
        {"tool_calls": []},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_a_role_or_an_empty_chunk_does_not(fields: dict[str, Any]) -> None:
    trace = read(delta(**fields), delta(content="a"), delta("stop"), DONE)
    assert trace.text_at == [2.0]
    assert trace.ended == 3.0


def test_an_answer_of_tokens_without_text_still_ends() -> None:
    trace = read(text("", "length"), usage(3, 1), DONE)
    assert (trace.error, trace.ended, trace.ttft) == (None, 1.0, 1.0)
    trace = read(usage(3, 1), DONE)
    assert (trace.error, trace.ended) == (None, 100.0)


def test_usage_with_every_chunk_ends_at_the_last() -> None:
    """Also nothing or null where a count could be."""
    chunks = [
        frame(choices=[{"text": "a", "finish_reason": None}], usage={"prompt_tokens": 5, "completion_tokens": n})
        for n in (1, 3)
    ]
    end = frame(choices=[{"text": "", "finish_reason": "stop"}], usage={"prompt_tokens_details": None})
    trace = read(*chunks, end, DONE)
    assert (trace.prompt_tokens, trace.output_tokens, trace.cached_tokens) == (5, 3, None)


@pytest.mark.parametrize("last", [b"data: [DONE]\n", b"data: [DONE]"])
def test_the_last_event_may_lack_its_empty_line(last: bytes) -> None:
    assert read(text("a"), last).error is None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([text("a")], "the stream broke off before the answer was complete"),
        ([], "the stream broke off before the answer was complete"),
        ([DONE], "the answer is empty"),
        ([text("", "stop"), usage(3, 0), DONE], "the answer is empty"),
        ([text("a"), frame(error={"message": "out of blocks", "code": 500}), DONE], "out of blocks"),
        ([frame(error="plain words"), DONE], "plain words"),
        ([frame(object="error", message="as vLLM once did", code=400), DONE], "as vLLM once did"),
        ([b"data: {broken\n\n", DONE], "a chunk that is none: JSON is malformed"),
        ([b"data: \xff\n\n", DONE], "a chunk that is none: "),
        ([frame(choices=3), DONE], "a chunk that is none: Expected `array`"),
    ],
)
def test_what_is_no_complete_answer_is_a_failure_that_says_why(pieces: list[bytes], message: str) -> None:
    error = read(*pieces).error
    assert error is not None
    assert error.startswith(message)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ({"error": {"message": "a\n  b", "type": "x"}}, "a b"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "c"}, "c"),
        ({"other": 1}, '{"other":1}'),
        ("x" * 400, "x" * 300 + "..."),
        (["a"], "['a']"),
    ],
)
def test_an_error_is_one_line(error: Any, line: str) -> None:
    assert error_message(error) == line
    assert error_message(json.loads(json.dumps(error))) == line
