"""The chat, against a server that says what it is told to."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.running import eventually
from tests.web.browser import DESKTOP, PHONE, NewPage, check_accessible, check_on_both, next_frame, shown_as
from tests.web.scripted import HOSTILE_NAME, Script, ScriptedServer, says, scripted_server

pytestmark = pytest.mark.slow

TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'


STICKING_OUT = """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("*")]
    .filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 100))"""


@pytest.fixture
def page(new_page: NewPage, server: ScriptedServer) -> Page:
    return opened(new_page(refused=(400, 429, 500, 503)), server)


def opened(page: Page, server: ScriptedServer) -> Page:
    page.goto(f"{server.url}#/chat")
    expect(composer(page)).to_be_visible()
    return page


def composer(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def send(page: Page, text: str) -> None:
    composer(page).fill(text)
    composer(page).press("Enter")


def finished(page: Page) -> None:
    """The answer to what was done last."""
    next_frame(page)
    expect(page.get_by_role("button", name=re.compile("Regenerate|Try again"))).to_be_visible()


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def conversation(server: ScriptedServer) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in server.asked[-1]["messages"]]


def test_an_answer_is_shown_while_it_comes_and_measured_when_it_is_there(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script([{"content": "Hello "}, {"content": "there"}], waits=True, pace_s=0.02))
    send(page, "Hi")
    expect(answers(page)).to_contain_text("Hello there")
    expect(answers(page)).to_have_attribute("aria-busy", "true")
    expect(answers(page)).to_contain_text(re.compile(r"[\d.,]+ tok/s.*2 tokens"))
    expect(button(page, "Stop")).to_be_visible()
    server.go_on.set()
    finished(page)
    shown = answers(page).inner_text()
    assert re.search(r"TTFT [\d.,]+ m?s", shown)
    assert re.search(r"[\d.,]+ tok/s", shown)
    assert "7 tokens" in shown
    assert "prompt 41, cached 32" in shown
    expect(page.get_by_text("48 of 4,096 tokens of context")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("The answer is complete")


def test_what_is_asked_is_what_the_controls_say(page: Page, server: ScriptedServer) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    for label, value in (("Temperature", "0.63"), ("Top-p", "0.5"), ("Top-k", "40"), ("Longest answer", "99999")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Min-p, slider").fill("0.1")
    expect(page.get_by_label("Min-p", exact=True)).to_have_value("0.1")
    page.get_by_label("Seed").fill("12x")
    expect(page.get_by_text("A whole number, or empty.")).to_be_visible()
    page.get_by_label("Seed").fill("12")
    send(page, "Hi")
    finished(page)
    asked = server.asked[-1]
    sampling = {name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")}
    assert sampling == {"temperature": 0.63, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "max_tokens": 4096, "seed": 12}
    assert asked["model"] == "scripted"
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "logprobs" not in asked
    assert "tools" not in asked
    assert conversation(server) == [("system", "Be brief."), ("user", "Hi")]


def test_everything_is_done_from_the_keyboard(page: Page, server: ScriptedServer) -> None:
    expect(composer(page)).to_be_focused()
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line")
    page.keyboard.press("Enter")
    finished(page)
    assert conversation(server) == [("user", "first\nline")]
    expect(composer(page)).to_have_value("")

    page.keyboard.press("Alt+r")
    expect(answers(page)).to_have_count(1)
    finished(page)
    assert len(server.asked) == 2
    assert server.asked[0]["messages"] == server.asked[1]["messages"]

    page.keyboard.press("ArrowUp")
    editor = page.get_by_label("Edit your message")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("first\nline")
    page.keyboard.press("Escape")
    expect(editor).to_have_count(0)
    composer(page).press("ArrowUp")
    editor.fill("other words")
    page.keyboard.press("Enter")
    finished(page)
    assert conversation(server) == [("user", "other words")]

    page.keyboard.press("Alt+p")
    expect(page.get_by_label("Token probabilities")).to_be_checked()
    page.keyboard.press("Alt+s")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Alt+n")
    expect(answers(page)).to_have_count(0)
    expect(composer(page)).to_be_focused()


def test_escape_stops_the_answer_and_keeps_what_came(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script([{"content": "As "}, {"content": "far as"}], waits=True, pace_s=0.02))
    send(page, "Go")
    expect(answers(page)).to_contain_text("As far as")
    composer(page).fill("written meanwhile")
    page.keyboard.press("Enter")
    expect(composer(page)).to_have_value("written meanwhile")
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text(re.compile(r"[\d.,]+ tok/s.*2 tokens.*stopped"))
    expect(button(page, "Stop")).to_have_count(0)
    expect(composer(page)).to_have_value("written meanwhile")
    page.keyboard.press("Enter")
    finished(page)
    assert conversation(server) == [("user", "Go"), ("assistant", "As far as"), ("user", "written meanwhile")]


def test_an_edited_question_replaces_what_followed_it(page: Page, server: ScriptedServer) -> None:
    for text in ("one", "two"):
        send(page, text)
        finished(page)
    expect(button(page, "Edit")).to_have_count(1)
    button(page, "Edit").click()
    page.get_by_label("Edit your message").fill("three")
    button(page, "Send again").click()
    finished(page)
    assert conversation(server) == [("user", "one"), ("assistant", "one"), ("user", "three")]
    expect(answers(page)).to_have_count(2)


def test_thoughts_are_folded_until_asked_for(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script([{"reasoning_content": "I <b>wonder</b>."}, {"content": "42"}]))
    send(page, "Why?")
    finished(page)
    expect(page.get_by_text("I <b>wonder</b>.")).to_be_hidden()
    page.get_by_text("Thought").click()
    expect(page.get_by_text("I <b>wonder</b>.")).to_be_visible()
    send(page, "Again")
    finished(page)
    assert "reasoning_content" not in server.asked[-1]["messages"][1]


def test_tools_are_offered_called_and_answered(page: Page, server: ScriptedServer) -> None:
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools as a JSON list").fill("{")
    expect(page.locator("[aria-invalid=true]")).to_have_count(1)
    page.get_by_label("Tools as a JSON list").fill(TOOLS)
    expect(page.locator("[aria-invalid=true]")).to_have_count(0)
    page.get_by_label("Calls").select_option("required")
    calls = [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"<i>Rome</i>"}'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "now", "arguments": "{}"}}]},
    ]
    server.scripts.append(Script(calls, finish="tool_calls"))
    send(page, "Weather?")
    call = page.get_by_label("Call of get_weather")
    expect(call.get_by_label("Arguments")).to_have_text('{\n  "city": "<i>Rome</i>"\n}')
    assert server.asked[-1]["tool_choice"] == "required"
    assert server.asked[-1]["tools"][0]["function"]["name"] == "get_weather"

    page.get_by_label("Result of get_weather").fill("21 degrees")
    page.get_by_label("Result of now").fill("noon")
    server.scripts.append(says("It is warm."))
    button(page, "Give back results").click()
    expect(page.get_by_text("It is warm.")).to_be_visible()
    assert server.asked[-1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "<i>Rome</i>"}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    expect(page.get_by_role("article", name="Tool result").first).to_contain_text("21 degrees")


def token(raw: bytes, probability: float) -> dict[str, Any]:
    text = raw.decode(errors="replace")
    entry = {"token": text, "bytes": list(raw), "logprob": math.log(probability)}
    other = {"token": "<u>other</u>", "bytes": None, "logprob": math.log((1 - probability) / 2 + 1e-9)}
    return entry | {"top_logprobs": [entry, other]}


def test_every_token_can_show_how_likely_it_was(page: Page, server: ScriptedServer) -> None:
    page.get_by_label("Token probabilities").check()
    raw = "é".encode()
    logprobs = [token(b"Sure", 0.95), token(raw[:1], 0.6), token(raw[1:], 0.3), token(b" <b>", 0.1), token(b"\n", 0.01)]
    texts = ["Sure", "", "é", " <b>", "\n"]
    server.scripts.append(Script([{"content": text} for text in texts], logprobs))
    send(page, "Hi")
    finished(page)
    assert server.asked[-1]["logprobs"] is True
    assert server.asked[-1]["top_logprobs"] == 5
    tokens = page.get_by_role("group", name="Tokens of this answer").get_by_role("button")
    assert tokens.all_text_contents() == texts
    assert [each.get_attribute("data-level") for each in tokens.all()] == ["0", "1", "2", "3", "4"]
    looks = tokens.evaluate_all("all => all.map(e => getComputedStyle(e).borderBottomStyle)")
    assert len(set(looks)) >= 4, "levels differ by more than their colour"

    tokens.nth(3).hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("␣<b>")
    expect(tip).to_contain_text("10 %")
    expect(tip).to_contain_text("<u>other</u>")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("30 %")
    expect(tokens.nth(2)).to_have_attribute("aria-label", "é, 30 %")

    button(page, "Probabilities").click()
    expect(tokens).to_have_count(0)
    expect(page.locator(".md")).to_contain_text("Sureé <b>")


def test_errors_are_told_in_place_and_nothing_is_lost(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script(error="256 requests wait already.", status=429))
    send(page, "A question that took long to write")
    expect(page.get_by_role("alert")).to_have_text("256 requests wait already.")
    expect(page.get_by_role("article", name="You")).to_have_text(re.compile("A question that took long to write"))
    server.scripts.append(Script([{"content": "Half an"}], error="The engine stopped."))
    button(page, "Try again").click()
    expect(page.get_by_role("alert")).to_have_text("The engine stopped.")
    expect(answers(page)).to_contain_text("Half an")
    server.scripts.append(Script([{"content": "Also half"}], breaks_off=True))
    button(page, "Regenerate").click()
    expect(page.get_by_role("alert")).to_have_text("The connection ended before the answer was complete.")
    server.scripts.append(says("Whole."))
    button(page, "Regenerate").click()
    expect(answers(page)).to_contain_text("Whole.")
    assert len(server.asked) == 4
    assert all(conversation(server) == [("user", "A question that took long to write")] for _ in server.asked)


def test_a_failed_answer_is_no_part_of_the_next_question(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script(error="The prompt has 5000 tokens, the context is 4096.", status=400))
    send(page, "too long")
    expect(page.get_by_role("alert")).to_contain_text("5000 tokens")
    send(page, "short")
    finished(page)
    assert conversation(server) == [("user", "too long"), ("user", "short")]


def test_a_cut_answer_says_so(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script([{"content": "On and"}], finish="length"))
    send(page, "Go")
    expect(answers(page)).to_contain_text("cut at the token limit")


def test_the_conversation_outlives_a_change_of_view(page: Page, server: ScriptedServer) -> None:
    server.scripts.append(Script([{"content": "Still "}], waits=True))
    send(page, "Hi")
    expect(answers(page)).to_contain_text("Still")
    composer(page).fill("a draft")
    page.get_by_role("link", name="Layout").click()
    expect(page.get_by_role("heading", name="What every rank holds")).to_be_visible()
    server.go_on.set()
    page.get_by_role("link", name="Chat").click()
    finished(page)
    expect(answers(page)).to_contain_text("Still")
    expect(composer(page)).to_have_value("a draft")


def test_a_long_answer_is_followed_until_the_reader_scrolls(page: Page, server: ScriptedServer) -> None:
    lines = [{"content": f"line {number}\n\n"} for number in range(3000)]
    server.scripts.append(Script([*lines, {"content": "the end"}]))
    send(page, "Go")
    finished(page)
    expect(page.locator(".md p").last).to_have_text("the end")
    expect(page.locator(".md p")).to_have_count(3001)
    log = page.get_by_role("log")
    to_end = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    assert eventually(lambda: log.evaluate(to_end) < 50)

    server.go_on.clear()
    server.scripts.append(Script([{"content": "more\n\n" * 200}], waits=True))
    send(page, "More")
    expect(answers(page).last).to_contain_text("more")
    log.evaluate("e => e.scrollTo(0, 100)")
    expect(button(page, "↓ Latest")).to_be_visible()
    server.go_on.set()
    finished(page)
    assert log.evaluate("e => e.scrollTop") == 100
    button(page, "↓ Latest").click()
    expect(button(page, "↓ Latest")).to_have_count(0)
    assert eventually(lambda: log.evaluate(to_end) < 50)


def test_a_servers_hostile_name_prompt_and_address_stay_text(new_page: NewPage) -> None:
    with scripted_server(HOSTILE_NAME) as server:
        page = new_page(refused=(400,))
        page.goto(f"{server.url}?x=<script>window.__pwned=1</script>#/chat?<img src=x onerror=window.__pwned=1>")
        expect(page.get_by_role("heading", name=HOSTILE_NAME)).to_be_visible()
        send(page, "<script>window.__pwned=1</script><img src=x onerror=window.__pwned=1>")
        finished(page)
        for place in ("javascript:window.__pwned=1", "chat?model=<svg onload=window.__pwned=1>", "%3Cscript%3E"):
            page.evaluate("place => { location.hash = '#/' + place }", place)
            expect(composer(page)).to_be_visible()
        page.evaluate(
            """name => { location.hash = "#/layout?" + new URLSearchParams(
                {model: name, gpu: name, tp: name, step: name, rank: name}) }""",
            HOSTILE_NAME + "x",
        )
        expect(page.get_by_role("alert")).to_contain_text("is not in the catalog")
        expect(page.get_by_label("Model", exact=True)).to_have_value(HOSTILE_NAME + "x")
        assert page.evaluate("window.__pwned") is None
        assert page.locator("img, script:not([src]), svg:not(.emblem), iframe").count() == 0


def test_axe_finds_nothing_serious(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(refused=(429,)), server)
    check_on_both(page)
    server.scripts.append(
        says("# Title\n\n- a [link](https://x.test)\n\n```py\nx\n```\n\n> quote\n\n|a|b|\n|-|-|\n|1|2|")
    )
    send(page, "Hi")
    finished(page)
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    server.scripts.append(Script([{"reasoning_content": "Hm."}, call], finish="tool_calls"))
    send(page, "Call")
    page.get_by_text("Thought").click()
    check_on_both(page)
    logprobs = [token(b"a", chance) for chance in (0.95, 0.6, 0.3, 0.1, 0.01)]
    server.scripts.append(Script([{"content": "a"}] * 5, logprobs))
    button(page, "Give back the result").click()
    expect(page.locator(".tokens-text .tok")).to_have_count(5)
    finished(page)
    page.locator(".tokens-text .tok").first.focus()
    check_on_both(page)
    server.scripts.append(Script(error="No place.", status=429))
    send(page, "Once more")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_text("Shortcuts").click()
    button(page, "Settings").click()
    page.get_by_text("Tools", exact=True).click()
    for scheme, size in (("dark", PHONE), ("light", DESKTOP)):
        shown_as(page, scheme, **size)
        check_accessible(page)
        assert page.evaluate(STICKING_OUT) == []
        assert page.get_by_role("log").evaluate("e => e.scrollWidth <= e.clientWidth"), "messages scroll up and down"
