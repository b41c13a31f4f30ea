"""The parsers together: any pieces, any text, any nesting, any length; and which model gets which."""

# ruff: noqa: RUF001 (the bars are the model's own)

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.models.parsers import parsers_for
from phalanx.server.parsers import REASONING_PARSERS, TOOL_PARSERS, Delta, OutputParser, ToolCallDelta

from . import test_deepseek_v31, test_hermes, test_llama3_json, test_llama4_pythonic, test_qwen3_xml, test_think
from .outputs import WEATHER, Meaning, parse, pieces_of

EVERY_OUTPUT = [
    *(("hermes", output) for output in test_hermes.OUTPUTS),
    *(("hermes", replace(output, reasoner="qwen3")) for output in test_think.BOTH + test_think.ONLY_QWEN3),
    *(("qwen3_xml", output) for output in test_qwen3_xml.OUTPUTS),
    *(("llama3_json", output) for output in test_llama3_json.OUTPUTS),
    *(("llama4_pythonic", output) for output in test_llama4_pythonic.OUTPUTS),
    *(("deepseek_v31", output) for output in test_deepseek_v31.OUTPUTS),
]

FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>"),
    *("<parameter=city>", "<parameter=", "</parameter>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", '{"name":', '"name"', '"a"', '"arguments"', '"parameters"', '{"name":"a","arguments":{'),
    *('{"name":"a"', '{"parameters":{"n":1},"name":"b"}', "{}", "}}", "{", "}", "[", "]", "(", ")"),
    *("[a(", "n=1", ")]", "[f(s='x'),"),
    *(",", ";", ":", "=", "\\", '\\"', '"', "'", '"""', "<", ">", "</", "-", "1", "true", "é", "🦜", " ", "\n", "\n\n"),
]

SOUP = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=24).map("".join)

TOOLS = st.sampled_from([*TOOL_PARSERS, None])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_however_an_output_is_cut_its_deltas_add_up_to_the_same(data: st.DataObject) -> None:
    tools, output = data.draw(st.sampled_from(EVERY_OUTPUT))
    schemas = [test_qwen3_xml.SCHEMA]
    meaning = parse(
        data.draw(pieces_of(output.text)), tools, schemas=schemas, reasoner=output.reasoner, thinking=output.thinking
    )
    assert meaning == Meaning(output.reasoning, output.content, output.calls)


@given(st.data(), SOUP, TOOLS, st.sampled_from([*REASONING_PARSERS, None]), st.sampled_from([None, True, False]))
@settings(max_examples=400, deadline=None)
def test_any_text_in_any_pieces_means_one_thing_that_can_be_sent(
    data: st.DataObject, text: str, tools: str | None, reasoner: str | None, thinking: bool | None
) -> None:
    whole = parse([text], tools, reasoner=reasoner, thinking=thinking)
    for pieces in (list(text), data.draw(pieces_of(text))):
        assert parse(pieces, tools, reasoner=reasoner, thinking=thinking) == whole
    str(whole).encode()
    assert is_in_order(whole.reasoning + whole.content, text), "words nobody wrote"


@given(SOUP, TOOLS)
@settings(max_examples=400, deadline=None)
def test_without_a_call_no_character_is_lost(text: str, tools: str | None) -> None:
    meaning = parse(list(text), tools)
    if not meaning.calls:
        assert meaning.content == text


@given(SOUP, TOOLS, st.sampled_from(list(REASONING_PARSERS)), st.sampled_from([None, True, False]))
@settings(max_examples=200, deadline=None)
def test_without_a_call_a_thought_loses_only_its_tags_and_the_space_around_them(
    text: str, tools: str | None, reasoner: str, thinking: bool | None
) -> None:
    meaning = parse(list(text), tools, reasoner=reasoner, thinking=thinking)
    if not meaning.calls:
        assert without_tags_and_space(meaning.reasoning + meaning.content) == without_tags_and_space(text)


def is_in_order(part: str, text: str) -> bool:
    """Whether the part is the text with characters left out."""
    characters = iter(text)
    return all(character in characters for character in part)


def without_tags_and_space(text: str) -> str:
    text, count = re.subn(r"\s|</?think>", "", text)
    return without_tags_and_space(text) if count else text


DEPTH = 10_000
NESTED = "[" * DEPTH + "]" * DEPTH


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"n": {NESTED}}}}}</tool_call>'),
        ("llama3_json", f'{{"name": "a", "parameters": {{"n": {NESTED}}}}}'),
        ("deepseek_v31", f'<｜tool▁call▁begin｜>a<｜tool▁sep｜>{{"n": {NESTED}}}<｜tool▁call▁end｜>'),
    ],
)
def test_arguments_may_nest_as_deep_as_the_model_likes(tools: str, text: str) -> None:
    assert parse([text], tools).calls == (("a", f'{{"n": {NESTED}}}'),)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", f'<tool_call>{{"arguments": {{"n": {NESTED}}}, "name": "a"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ' * DEPTH),
        ("hermes", '<tool_call>{"name": {' + '"a": {' * DEPTH),
        ("llama3_json", f'{{"parameters": {{"n": {NESTED}}}, "name": "a"}}'),
        ("llama3_json", "{" * DEPTH),
        ("llama3_json", '{"name":' * DEPTH),
        ("llama4_pythonic", f"[a(n={NESTED})]"),
        ("llama4_pythonic", "[a(n=" * DEPTH),
        ("llama4_pythonic", f"[a(n={'-' * DEPTH}1)]"),
        ("llama4_pythonic", f"[a(n={'not ' * DEPTH}1)]"),
        ("llama4_pythonic", f"[a(n={'b.' * DEPTH}c)]"),
        ("llama4_pythonic", f"[a(n={'b+' * DEPTH}c)]"),
        ("llama4_pythonic", f"[a(n={'lambda:' * DEPTH}c)]"),
        ("llama4_pythonic", f"[a(n={'b if c else ' * DEPTH}d)]"),
        ("llama4_pythonic", f"[a(n=b{'()' * DEPTH})]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>" * DEPTH),
    ],
    ids=lambda text: text[:32],
)
def test_what_nests_too_deep_to_read_is_content(tools: str, text: str) -> None:
    assert parse([text], tools) == Meaning("", text, ())


def test_a_typed_value_that_nests_too_deep_is_a_string() -> None:
    text = f"<function=f><parameter=a>{NESTED}</parameter></function>"
    assert parse([text], "qwen3_xml", schemas=[test_qwen3_xml.SCHEMA]).calls == (("f", f'{{"a": "{NESTED}"}}'),)


LENGTH = 100_000


def seconds(pieces: Iterable[str], tools: str) -> float:
    """CPU time to read the pieces."""
    parser = OutputParser(None, tools, [WEATHER])
    start = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return time.process_time() - start


PLAIN_WORDS = "plain " * (LENGTH // 60)


@pytest.mark.parametrize(
    ("tools", "beginning", "unit"),
    [
        ("hermes", "", " "),
        ("hermes", '<tool_call>{"name": "', "x"),
        ("hermes", '<tool_call>{"x": 1', ', "y": {}'),
        ("qwen3_xml", "<function=f><parameter=s>", "\n"),
        ("qwen3_xml", "<function=f><parameter=s>", "</param"),
        ("qwen3_xml", "<function=", "x"),
        ("llama3_json", "{", " "),
        ("llama4_pythonic", "[a(n='''", "''\\"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>", "a"),
    ],
)
def test_a_long_text_takes_time_in_proportion(tools: str, beginning: str, unit: str) -> None:
    """To go over all that is held at every piece would take twenty times as long as plain words, and more: these are a
    tenth as many."""
    text = beginning + unit * (LENGTH // len(unit))
    assert any(seconds(text, tools) < 80 * seconds(PLAIN_WORDS, "hermes") for _ in range(3))


@pytest.mark.parametrize(
    ("tools", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}'),
        ("qwen3_xml", "<function=f><parameter=city>1</parameter>"),
        ("llama3_json", '{"name":'),
        ("llama4_pythonic", "<|python_start|>[a(n=1)]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ],
)
def test_a_long_piece_with_many_tags_takes_time_in_proportion(tools: str, unit: str) -> None:
    """To go over the rest of the piece at every tag would take sixteen times as long for four times the text."""
    text = unit * (2 * LENGTH // len(unit))
    assert any(seconds([text * 4], tools) < 9 * seconds([text], tools) for _ in range(3))


def test_without_parsers_text_is_content() -> None:
    for pieces in (["  <think>a</think>\n", '<tool_call>{"name": "a"}', " "], list(" \n")):
        assert parse(pieces, None) == Meaning("", "".join(pieces), ())


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_without_tools_in_the_request_there_are_no_calls(tools: str) -> None:
    for parser, output in EVERY_OUTPUT:
        if parser == tools and output.reasoner is None:
            assert parse(list(output.text), tools, schemas=[]) == Meaning("", output.text, ())


def test_a_call_has_an_id_of_its_own() -> None:
    parser = OutputParser(None, "hermes", [WEATHER])
    delta = parser.feed('<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 2)
    first, second = (call.id for call in delta.tool_calls)
    assert first != second
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in (first, second) if id)
    assert None not in (first, second)


def test_a_delta_that_carries_nothing_is_falsy() -> None:
    assert not Delta()
    assert Delta(content="a")
    assert Delta(reasoning="a")
    assert Delta(tool_calls=(ToolCallDelta(0, "call_0", "a", ""),))


@pytest.mark.parametrize(
    ("reasoning", "tools", "needed"),
    [
        (None, None, False),
        ("qwen3", "hermes", False),
        ("deepseek_r1", "qwen3_xml", False),
        (None, "llama3_json", True),
        (None, "llama4_pythonic", True),
        ("deepseek_r1", "deepseek_v31", True),
    ],
)
def test_special_tokens_are_needed_where_tags_are_such_tokens(reasoning: str, tools: str, needed: bool) -> None:
    assert OutputParser(reasoning, tools, [WEATHER]).needs_special_tokens == needed
    assert not OutputParser(reasoning, tools).needs_special_tokens, "without tools there are no such tags"


def test_an_unknown_parser_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="hermes") as error:
        OutputParser(None, "harmony", [WEATHER])
    assert error.value.code == "unknown_parser"
    with pytest.raises(ConfigError, match="deepseek_r1, qwen3"):
        OutputParser("hermes", None)
    with pytest.raises(ConfigError):
        OutputParser(None, "harmony")


@pytest.mark.parametrize(
    ("model_type", "name", "reasoning", "tools"),
    [
        ("qwen2", "Qwen/Qwen2.5-7B-Instruct", None, "hermes"),
        ("qwen2", "Qwen/QwQ-32B", "deepseek_r1", "hermes"),
        ("qwen2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "deepseek_r1", None),
        ("qwen3", "Qwen/Qwen3-8B", "qwen3", "hermes"),
        ("qwen3_moe", "Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3", "hermes"),
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B-Instruct-2507", None, "hermes"),
        ("qwen3_moe", "Qwen/Qwen3-Coder-30B-A3B-Instruct", None, "qwen3_xml"),
        ("qwen3", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "deepseek_r1", None),
        ("llama", "meta-llama/Llama-3.1-8B-Instruct", None, "llama3_json"),
        ("llama", "meta-llama/Meta-Llama-3.1-70B-Instruct", None, "llama3_json"),
        ("llama", "models/llama3.3-70b", None, "llama3_json"),
        ("llama", "meta-llama/Meta-Llama-3-8B", None, None),
        ("llama", "NousResearch/Hermes-3-Llama-3.1-8B", None, "hermes"),
        ("llama", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek_r1", None),
        ("llama", "HuggingFaceTB/SmolLM2-135M-Instruct", None, None),
        ("llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", None, "llama4_pythonic"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-R1", "deepseek_r1", None),
        ("deepseek_v3", "models/r1-0528", "deepseek_r1", None),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek_r1", "deepseek_v31"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3", None, None),
        ("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1", None, None),
        ("qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Instruct", None, "hermes"),
        ("qwen3_5_moe", "Qwen/Qwen3.5-397B-A17B", "qwen3", "qwen3_xml"),
        ("unheard_of", "a/b", None, None),
    ],
)
def test_a_model_gets_the_parsers_of_its_family(
    model_type: str, name: str, reasoning: str | None, tools: str | None
) -> None:
    assert parsers_for(model_type, name) == (reasoning, tools)
