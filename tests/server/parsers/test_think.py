"""Reasoning between `<think>` and `</think>`, and what follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.server.parsers import OutputParser

from .outputs import WEATHER, Output, check

CALL = '<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>'
CALLED = (("a", '{"n": 1}'),)

BOTH = [
    Output("thought and answer", "<think>\nHm.\n</think>\n\nParis.", reasoning="Hm.", content="Paris."),
    Output(
        "the prompt opened the thought", "\nHm.\n</think>\n\nParis.", reasoning="Hm.", content="Paris.", thinking=True
    ),
    Output("it is not known who opened it", "Hm.\n</think>\n\nParis.", reasoning="Hm.", content="Paris."),
    Output("opened twice", "<think>Hm.</think>Paris.", reasoning="Hm.", content="Paris.", thinking=True),
    Output("space before the thought", " \n<think>Hm.</think>Paris.", reasoning="Hm.", content="Paris."),
    Output("space inside", "a\n\n b  c </think> d  e", reasoning="a\n\n b  c", content="d  e"),
    Output("an empty thought", "<think>\n\n</think>\n\nParis.", content="Paris."),
    Output("a thought without an answer", "<think>\nHm.\n</think>\n\n", reasoning="Hm."),
    Output("cut off in the thought", "<think>\nHm, Par", reasoning="Hm, Par"),
    Output("cut off in a thought the prompt opened", "Hm, Par\n", reasoning="Hm, Par", thinking=True),
    Output("cut off in the end tag", "Hm.</thin", reasoning="Hm.</thin"),
    Output("cut off in the first tag", "<thi", reasoning="<thi"),
    Output("nothing", ""),
    Output("space after the answer is content", "Hm.</think>\nParis. \n", reasoning="Hm.", content="Paris. \n"),
    Output(
        "other tags",
        "1 < 2 <b></b> </thinking></think>1 < 2 <b>",
        reasoning="1 < 2 <b></b> </thinking>",
        content="1 < 2 <b>",
    ),
    Output("a second opening tag is text", "<think><think>a</think>b", reasoning="<think>a", content="b"),
    Output("the end tag again", "Hm.\n</think>\n\n</think>\n</think>Paris.", reasoning="Hm.", content="Paris."),
    Output(
        "the end tag in the answer is text", "Hm.</think>Write </think>.", reasoning="Hm.", content="Write </think>."
    ),
    Output("half an end tag again", "Hm.</think> </thin", reasoning="Hm.", content="</thin"),
    Output(
        "letters of the world", "<think>Größe 🤔\u3000?</think>北京 🏮", reasoning="Größe 🤔\u3000?", content="北京 🏮"
    ),
    Output("a call after the thought", f"<think>Hm.</think>\n\n{CALL}", reasoning="Hm.", calls=CALLED),
    Output(
        "an answer and a call",
        f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n",
        reasoning="Hm.",
        content="Let me look.",
        calls=CALLED,
    ),
    Output(
        "half an end tag around a call",
        f"Hm.</think></th{CALL}ink>.",
        reasoning="Hm.",
        content="</think>.",
        calls=CALLED,
    ),
    Output("not thinking", "Paris.", content="Paris.", thinking=False),
    Output("not thinking, space first", "\n\nParis. ", content="Paris. ", thinking=False),
    Output(
        "not thinking, yet it does",
        "\n<think>\nHm.\n</think>\n\nParis.",
        reasoning="Hm.",
        content="Paris.",
        thinking=False,
    ),
    Output("not thinking, cut off in a thought", "<think>Hm", reasoning="Hm", thinking=False),
    Output("not thinking, cut off in the tag", "<thi", content="<thi", thinking=False),
    Output(
        "not thinking, tags in the answer", "Use <think>a</think>.", content="Use <think>a</think>.", thinking=False
    ),
    Output("not thinking, an end tag first", "</think>\n\nParis.", content="Paris.", thinking=False),
    Output("not thinking, a call", f"\n{CALL}", calls=CALLED, thinking=False),
]

ONLY_QWEN3 = [
    Output("a call ends the thought", f"<think>I must look.\n{CALL}", reasoning="I must look.", calls=CALLED),
    Output("a call instead of a thought", CALL, calls=CALLED),
    Output(
        "the end tag after the call", f"Hm. {CALL}\n</think>\nDone.", reasoning="Hm.", content="Done.", calls=CALLED
    ),
    Output(
        "the call's tag alone ends it too",
        "Hm, <tool_call> is the tag.\n",
        reasoning="Hm,",
        content="<tool_call> is the tag.\n",
    ),
    Output("half the call's tag", "Hm. <tool_cal", reasoning="Hm. <tool_cal"),
]

ONLY_DEEPSEEK_R1 = [
    Output("a call's tag is part of the thought", f"Hm. {CALL} </think>Ok.", reasoning=f"Hm. {CALL}", content="Ok."),
]


@pytest.mark.parametrize("reasoner", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("output", BOTH, ids=str)
def test_what_the_model_means(output: Output, reasoner: str) -> None:
    check(replace(output, reasoner=reasoner), "hermes")


@pytest.mark.parametrize("output", ONLY_QWEN3, ids=str)
def test_a_call_ends_a_thought_of_qwen3(output: Output) -> None:
    check(replace(output, reasoner="qwen3"), "hermes")


@pytest.mark.parametrize("output", ONLY_DEEPSEEK_R1, ids=str)
def test_only_the_end_tag_ends_a_thought_of_deepseek_r1(output: Output) -> None:
    check(replace(output, reasoner="deepseek_r1"), "hermes")


def test_the_tag_that_ends_a_thought_is_that_of_the_tool_parser() -> None:
    text = 'Hm. <tool_call><|python_tag|>{"name": "a", "parameters": {}}'
    check(Output("", text, reasoning="Hm. <tool_call>", calls=(("a", "{}"),), reasoner="qwen3"), "llama3_json")


def test_without_tools_a_call_is_part_of_the_thought() -> None:
    output = Output("", f"Hm. {CALL}</think> {CALL}\n", reasoning=f"Hm. {CALL}", content=f"{CALL}\n", reasoner="qwen3")
    check(output, None)
    check(output, "hermes", schemas=[])


@pytest.mark.parametrize("thinking", [None, True])
def test_in_reasoning_says_what_the_next_piece_is(thinking: bool | None) -> None:
    parser = OutputParser("qwen3", "hermes", [WEATHER], thinking)
    states = []
    for piece in ["<think>", "Hm", ".", "</think>", "Pa", "ris"]:
        states.append(parser.in_reasoning)
        parser.feed(piece)
    assert states == [True, True, True, True, False, False]


def test_without_thinking_only_a_tag_starts_reasoning() -> None:
    parser = OutputParser("qwen3", None, thinking=False)
    assert not parser.in_reasoning
    parser.feed("<thi")
    assert not parser.in_reasoning
    parser.feed("nk>")
    assert parser.in_reasoning
    parser.feed("Hm.</think>")
    assert not parser.in_reasoning


def test_a_call_ends_reasoning() -> None:
    parser = OutputParser("qwen3", "hermes", [WEATHER])
    parser.feed("Hm. <tool_call>")
    assert not parser.in_reasoning


def test_thoughts_go_out_as_they_come() -> None:
    parser = OutputParser("qwen3", None)
    thoughts = [parser.feed(piece).reasoning for piece in ["<think>\n", "I ", "think ", "</th", "ink>\n", "Paris"]]
    assert thoughts == ["", "I", " think", "", "", ""]
