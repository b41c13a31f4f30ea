"""A real browser for tests of pages: every page is watched, and a test fails on what a user's console would show."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

STATIC = Path(__file__).parents[2] / "src/phalanx/web/static"
PHONE: ViewportSize = {"width": 390, "height": 844}
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
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


@pytest.fixture(scope="package")
def context(browser: Browser) -> BrowserContext:
    """One for the first page of every test. A page of ours that stays open keeps the process that draws them all: what
    it has compiled is not compiled again."""
    context = browser.new_context()
    context.set_default_timeout(_PATIENCE_MS)
    kept = context.new_page()
    kept.route("**", lambda route: route.fulfill(body=""))
    kept.goto("http://127.0.0.1/")
    return context


@pytest.fixture
def new_page(browser: Browser, context: BrowserContext) -> Iterator[NewPage]:
    """Makes pages; keywords are those of a context. The second of a test knows nothing of the first.

    `refused`: statuses with which the server may answer without failing the test.
    """
    pages: list[Page] = []
    complaints: list[str] = []
    places: set[str] = set()
    note = lambda request: places.add(request.url)  # noqa: E731
    context.on("request", note)

    def make(
        *,
        refused: tuple[int, ...] = (),
        viewport: ViewportSize = DESKTOP,
        color_scheme: Literal["light", "dark"] = "light",
        reduced_motion: Literal["reduce", "no-preference"] = "reduce",
        **options: Any,
    ) -> Page:
        page = (context if not pages and not options else browser.new_context(**options)).new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        pages.append(page)
        watch(page, complaints, refused)
        return page

    yield make
    for page in pages:
        if page.context != context:
            page.context.close()
    context.remove_listener("request", note)
    forget(context, places)
    assert not complaints, "\n".join(complaints)


def forget(context: BrowserContext, places: set[str]) -> None:
    """Close its pages but for the one that stays, and drop all that was kept for those places."""
    stays, *others = context.pages
    for page in others:
        page.close()
    context.clear_cookies()
    devtools = context.new_cdp_session(stays)
    for origin in {place.split("/", 3)[2] for place in places if place.startswith("http")}:
        devtools.send("Storage.clearDataForOrigin", {"origin": f"http://{origin}", "storageTypes": "all"})
    devtools.detach()


def shown_as(page: Page, scheme: Literal["light", "dark"], width: int, height: int = 900) -> None:
    """The same page on another screen."""
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)


def next_frame(page: Page) -> None:
    """What was done is shown with the next frame. Until then the page looks as it did before."""
    page.evaluate("() => new Promise(requestAnimationFrame)")


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


def check_on_both(page: Page) -> None:
    """On a large screen by day, and on a phone by night."""
    shown_as(page, "light", **DESKTOP)
    check_accessible(page)
    shown_as(page, "dark", **PHONE)
    check_accessible(page)


def check_accessible(page: Page) -> None:
    """Fail on what axe finds serious or critical.

    Of a long table the first rows are looked at: the others are alike, and those of all models take seconds.
    """
    from axe_playwright_python.sync_playwright import Axe

    first_rows = {"exclude": [["tbody tr:nth-child(n+6)"]]}
    found = Axe().run(page, first_rows).response["violations"]
    grave = [
        f"{each['id']} ({each['impact']}): {each['help']}: "
        + "; ".join(f"{node['html'][:160]} {node.get('failureSummary', '')}" for node in each["nodes"][:3])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert not grave, "\n".join(grave)
