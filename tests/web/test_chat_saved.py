"""Conversations that the browser keeps: found again, renamed, exported, deleted, bounded, and sent nowhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.browser import PHONE, NewPage, check_accessible, shown_as
from tests.web.scripted import Script, ScriptedServer, says
from tests.web.test_chat import STICKING_OUT, answers, button, composer, conversation, finished, opened, send

pytestmark = pytest.mark.slow


@pytest.fixture
def page(new_page: NewPage, server: ScriptedServer) -> Page:
    return opened(new_page(), server)


def titles(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Conversations").locator(".saved-title > span")


def begin(page: Page, *questions: str) -> None:
    for question in questions:
        page.keyboard.press("Alt+n")
        expect(answers(page)).to_have_count(0)
        send(page, question)
        finished(page)


def test_it_is_found_again_after_a_reload_and_goes_on_from_there(page: Page, server: ScriptedServer) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    server.scripts.append(Script([{"reasoning_content": "Hm."}, {"content": "**Four**"}]))
    send(page, "What is two\nand two?")
    finished(page)
    page.reload()
    expect(answers(page)).to_contain_text("Four")
    expect(page.locator(".md strong")).to_have_text("Four")
    expect(answers(page)).to_contain_text("7 tokens")
    expect(titles(page)).to_have_text(["What is two and two?"])
    send(page, "And three?")
    finished(page)
    expect(titles(page)).to_have_text(["What is two and two?"])
    assert conversation(server) == [
        ("system", "Be brief."),
        ("user", "What is two\nand two?"),
        ("assistant", "**Four**"),
        ("user", "And three?"),
    ]


def test_one_is_opened_renamed_deleted_and_brought_back(page: Page) -> None:
    begin(page, "about apples", "about pears")
    expect(titles(page)).to_have_text(["about pears", "about apples"])
    page.get_by_role("button", name=re.compile("about apples")).click()
    expect(answers(page)).to_have_text(re.compile("about apples"))
    expect(page.locator("[aria-current=true]")).to_contain_text("about apples")

    button(page, "Rename").click()
    expect(page.get_by_label("Title")).to_be_focused()
    page.keyboard.type("<b>Fruit</b>")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["<b>Fruit</b>", "about pears"])
    button(page, "Rename").click()
    expect(page.get_by_label("Title")).to_be_focused()
    page.keyboard.type("no")
    page.keyboard.press("Escape")
    expect(titles(page).first).to_have_text("<b>Fruit</b>")

    button(page, "Delete").click()
    expect(titles(page)).to_have_text(["about pears"])
    expect(answers(page)).to_have_count(0)
    button(page, "Undo").click()
    expect(answers(page)).to_have_text(re.compile("about apples"))
    button(page, "Delete").click()
    page.reload()
    expect(titles(page)).to_have_text(["about pears"])
    assert "apples" not in page.evaluate("JSON.stringify({...localStorage})")


def test_what_has_come_of_an_answer_is_kept_when_another_is_opened_or_the_page_left(
    page: Page, server: ScriptedServer
) -> None:
    begin(page, "first")
    for leave in (lambda: page.get_by_role("button", name=re.compile("^first")).click(), page.reload):
        page.keyboard.press("Alt+n")
        expect(answers(page)).to_have_count(0)
        server.scripts.append(Script([{"content": "half an"}], waits=True))
        send(page, "second")
        expect(answers(page)).to_contain_text("half an")
        leave()
        page.get_by_role("button", name=re.compile("^second")).first.click()
        expect(answers(page)).to_contain_text("half an")
        expect(answers(page)).to_contain_text("stopped")
        expect(button(page, "Stop")).to_have_count(0)


def test_it_is_exported_as_the_api_takes_it_and_as_a_person_reads_it(
    page: Page, server: ScriptedServer, tmp_path: Path
) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    server.scripts.append(says("Warm."))
    send(page, "How is it?")
    finished(page)
    for kind in ("JSON", "Markdown"):
        with page.expect_download() as saved:
            button(page, kind).click()
        saved.value.save_as(tmp_path / kind)
    assert saved.value.suggested_filename == "How-is-it.md"
    assert json.loads((tmp_path / "JSON").read_text()) == {
        "title": "How is it?",
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": "Warm."},
        ],
    }
    assert (tmp_path / "Markdown").read_text() == (
        "# How is it?\n\n**System**\n\nBe brief.\n\n**You**\n\nHow is it?\n\n**scripted**\n\nWarm.\n"
    )


FILL = """([count, length]) => {
    for (let i = 0; i < count; i++) {
        const turn = {role: "user", text: "x".repeat(length), calls: []};
        localStorage.setItem(`phalanx.chat.old${i}`, JSON.stringify(
            {id: `old${i}`, title: `old ${i}`, changed: i, model: "", system: "", turns: [turn]}));
    }
}"""


def test_the_oldest_go_when_there_are_too_many_or_too_long_ones(page: Page) -> None:
    page.evaluate(FILL, [80, 10])
    page.reload()
    expect(titles(page)).to_have_count(80)
    begin(page, "the newest")
    expect(titles(page)).to_have_count(50)
    expect(titles(page).first).to_have_text("the newest")
    expect(titles(page).last).to_have_text("old 31")
    page.evaluate("localStorage.clear()")
    page.evaluate(FILL, [4, 1_000_000])
    page.reload()
    begin(page, "short")
    expect(titles(page)).to_have_text(["short", "old 3", "old 2"])


def test_a_browser_without_room_says_so_and_the_chat_goes_on(page: Page) -> None:
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full') } }")
    begin(page, "one")
    expect(page.get_by_text("There is no room in this browser")).to_be_visible()
    expect(answers(page)).to_contain_text("one")


def test_what_cannot_be_read_is_left_out(page: Page) -> None:
    page.evaluate(
        """() => {
            for (const [name, text] of Object.entries({a: "{", b: "null", c: '{"id": 7}', d: '"text"'}))
                localStorage.setItem(`phalanx.chat.${name}`, text);
            sessionStorage.setItem("phalanx.open", "a");
        }"""
    )
    page.reload()
    expect(composer(page)).to_be_visible()
    expect(titles(page)).to_have_count(0)
    begin(page, "fine")
    expect(titles(page)).to_have_text(["fine"])


def test_another_tab_shows_it_too(page: Page, server: ScriptedServer) -> None:
    other = opened(page.context.new_page(), server)
    begin(page, "seen elsewhere")
    expect(titles(other)).to_have_text(["seen elsewhere"])
    expect(answers(other)).to_have_count(0)


def test_it_fits_every_screen_and_is_accessible(page: Page) -> None:
    begin(page, "A question with averyveryveryverylongwordindeedthatcannotbebroken " * 3)
    for width, scheme in ((360, "dark"), (1000, "light"), (1280, "dark"), (2560, "light")):
        shown_as(page, scheme, width, PHONE["height"])
        page.reload()
        if width < 1200:
            button(page, "Conversations").click()
        expect(button(page, "Rename")).to_be_visible()
        check_accessible(page)
        button(page, "Rename").click()
        check_accessible(page)
        assert page.evaluate(STICKING_OUT) == [], width
        page.keyboard.press("Escape")
        page.keyboard.press("Alt+c")
        expect(page.locator(".saved-title").first).to_be_focused()
