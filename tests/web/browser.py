"""A real browser for tests of pages: every page is watched, and a test fails on what a user's console would show."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

STATIC = Path(__file__).parents[2] / "src/phalanx/web/static"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_PATIENCE_MS = 180_000

NewPage = Callable[..., Page]
expect.set_options(timeout=_PATIENCE_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The system's Chromium, one for all tests."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed")
    if not (STATIC / "index.html").exists():
        pytest.skip("the pages are not built: make web")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Makes pages, each in a context of its own; keywords are those of the context.

    `refused`: statuses with which the server may answer without failing the test.
    """
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(*, refused: tuple[int, ...] = (), **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        context.set_default_timeout(_PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        watch(page, complaints, refused)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not complaints, "\n".join(complaints)


def watch(page: Page, complaints: list[str], refused: tuple[int, ...] = ()) -> None:
    """Write down errors, broken policies and requests to other machines."""

    def heard(message: ConsoleMessage) -> None:
        answered = _REFUSED.match(message.text)
        if message.type == "error" and not (answered and int(answered[1]) in refused):
            complaints.append(f"console: {message.text} ({message.location})")

    def asked(request: Request) -> None:
        place = urlsplit(request.url)
        if place.scheme not in ("data", "blob") and place.hostname not in _LOOPBACK:
            complaints.append(f"a request left this machine: {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
    page.on("request", asked)


def check_accessible(page: Page) -> None:
    """Fail on what axe finds serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    grave = [
        f"{each['id']} ({each['impact']}): {each['help']}: "
        + "; ".join(f"{node['html'][:160]} {node.get('failureSummary', '')}" for node in each["nodes"][:3])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert not grave, "\n".join(grave)
