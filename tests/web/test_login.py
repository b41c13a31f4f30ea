"""The login of a real server with a key: kept in memory only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.conftest import make_checkpoint
from tests.server.conftest import add_tokenizer
from tests.server.running import Server, running
from tests.web.browser import NewPage, check_accessible
from tests.web.test_live import PATIENT_MS, events, status

pytestmark = pytest.mark.slow

KEY = "open-sesame-4711"
KEPT = """() => JSON.stringify([
    {...localStorage}, {...sessionStorage}, document.cookie, location.href, document.documentElement.outerHTML,
    performance.getEntriesByType("resource").map(entry => entry.name), history.state, window.name,
])"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("login")
    make_checkpoint("llama", folder)
    add_tokenizer(folder)
    with running(folder, folder, "--served-model-name", "tiny", "--api-key", KEY) as started:
        yield started


def log_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_a_wrong_key_is_told_and_the_right_one_opens(new_page: NewPage, server: Server) -> None:
    page = new_page(refused=(401,))
    page.goto(server.url)
    expect(page.get_by_label("API key")).to_be_focused(timeout=60_000)
    expect(page.get_by_role("button", name="Log in")).to_be_disabled()
    check_accessible(page)
    log_in(page, "wrong")
    expect(page.get_by_text("This key is wrong.")).to_be_visible(timeout=60_000)
    expect(page.get_by_label("API key")).to_have_attribute("aria-invalid", "true")
    assert page.get_by_label("API key").get_attribute("type") == "password"
    log_in(page, KEY)
    expect(page.get_by_label("Message", exact=True)).to_be_visible(timeout=60_000)


def test_the_key_opens_every_call_and_is_kept_nowhere(new_page: NewPage, server: Server, tmp_path: Path) -> None:
    page = new_page(refused=(401,))
    page.goto(f"{server.url}/#/chat")
    log_in(page, KEY)
    page.get_by_label("Longest answer").fill("16")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("16 tokens", exact=True)).to_be_visible()
    page.get_by_role("link", name="Layout").click()
    expect(page.get_by_role("heading", name="Layer 0 of tiny")).to_be_visible(timeout=60_000)
    assert KEY not in page.evaluate(KEPT)
    page.context.storage_state(path=tmp_path / "state.json")
    assert KEY not in (tmp_path / "state.json").read_text()
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible(timeout=60_000)
    expect(page.get_by_label("API key")).to_have_value("")


def test_the_live_stream_needs_the_key(new_page: NewPage, server: Server) -> None:
    for key in (None, "wrong"):
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            events(server, 1, key)
    assert events(server, 1, KEY)[0]["state"]["status"] == "ready"
    page = new_page(refused=(401,))
    page.goto(server.url + "/#/live")
    log_in(page, "wrong")
    expect(page.get_by_text("This key is wrong.")).to_be_visible()
    log_in(page, KEY)
    expect(status(page)).to_contain_text("Ready", timeout=PATIENT_MS)
