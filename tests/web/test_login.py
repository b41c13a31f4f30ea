"""The login, behind the server's own guard: the key is kept for the tab, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.web import made_up
from tests.web.browser import NewPage, check_accessible
from tests.web.scripted import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

KEY = "open-sesame-4711"
KEPT = """() => JSON.stringify([
    {...localStorage}, document.cookie, location.href, document.documentElement.outerHTML,
    performance.getEntriesByType("resource").map(entry => entry.name), history.state, window.name,
])"""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(keys=(KEY,)) as started:
        started.live = [made_up.event([made_up.sample(0)])]
        yield started


def log_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_a_wrong_key_is_told_and_the_right_one_opens(new_page: NewPage, server: ScriptedServer) -> None:
    page = new_page(refused=(401,))
    page.goto(server.url)
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.get_by_role("button", name="Log in")).to_be_disabled()
    check_accessible(page)
    log_in(page, "wrong")
    expect(page.get_by_text("This key is wrong.")).to_be_visible()
    expect(page.get_by_label("API key")).to_have_attribute("aria-invalid", "true")
    assert page.get_by_label("API key").get_attribute("type") == "password"
    assert page.evaluate("sessionStorage.length") == 0
    log_in(page, KEY)
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_the_key_is_kept_for_the_tab_alone(new_page: NewPage, server: ScriptedServer, tmp_path: Path) -> None:
    page = new_page(refused=(401,))
    page.goto(f"{server.url}#/chat")
    log_in(page, KEY)
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    assert KEY not in page.evaluate(KEPT)
    page.context.storage_state(path=tmp_path / "state.json")
    assert KEY not in (tmp_path / "state.json").read_text()
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()

    other = page.context.new_page()
    other.goto(server.url)
    expect(other.get_by_label("API key")).to_be_visible()

    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_have_value("")
    assert "open-sesame" not in page.evaluate("JSON.stringify({...sessionStorage})")
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_kept_key_that_no_longer_opens_is_forgotten(new_page: NewPage, server: ScriptedServer) -> None:
    page = new_page(refused=(401,))
    page.goto(server.url)
    page.evaluate("sessionStorage.setItem('phalanx.key', 'revoked')")
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_live_stream_needs_the_key(new_page: NewPage, server: ScriptedServer) -> None:
    for key in ("none", "wrong"):
        asked = httpx.get(f"{server.url}cockpit/live", headers={"authorization": f"Bearer {key}"})
        assert asked.status_code == 401
    page = new_page(refused=(401,))
    page.goto(server.url + "#/live")
    log_in(page, KEY)
    expect(page.get_by_label("State of the engine")).to_contain_text("Ready")
