"""The cockpit's files: built from these sources, small, and served under a strict policy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from playwright.sync_api import Browser

from phalanx.web.pages import PAGES, add_pages
from tests.web.browser import STATIC, watch

pytestmark = pytest.mark.slow

WEB = Path(__file__).parents[2] / "web"
SOURCES = ("index.html", "package-lock.json", "src", "tsconfig.json", "vite.config.ts")
MOST_BYTES = 600_000

needs_build = pytest.mark.skipif(not (STATIC / "index.html").exists(), reason="the pages are not built: make web")


def digest_of_sources() -> str:
    """As `web/vite.config.ts` counts it: every name and its bytes, in order of the names' UTF-16 units."""
    files = [path for name in SOURCES for path in ([WEB / name] if (WEB / name).is_file() else (WEB / name).rglob("*"))]
    names = sorted(
        (path.relative_to(WEB).as_posix() for path in files if path.is_file()), key=lambda n: n.encode("utf-16-be")
    )
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    return digest.hexdigest()


@needs_build
def test_the_pages_were_built_from_these_sources() -> None:
    assert (STATIC / "sources.sha256").read_text().strip() == digest_of_sources(), "the pages are stale: make web"


@needs_build
def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < MOST_BYTES


@needs_build
def test_nothing_in_the_page_is_inline() -> None:
    page = (STATIC / "index.html").read_text()
    assert "style=" not in page
    assert "<style" not in page
    assert all("src=" in part.partition(">")[0] for part in page.split("<script")[1:])


@needs_build
@pytest.mark.parametrize("path", PAGES)
def test_every_file_comes_with_the_policy_and_is_not_sent_twice(path: str) -> None:
    app = FastAPI()
    add_pages(app)
    with TestClient(app) as client:
        first = client.get(path)
        policy = first.headers["content-security-policy"]
        assert first.status_code == 200
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert client.get(path, headers={"if-none-match": first.headers["etag"]}).status_code == 304


def test_the_watch_sees_a_broken_policy_and_a_request_to_elsewhere(studio: str, browser: Browser) -> None:
    """Guards the guard: the browser refuses both, and says so."""
    page, complaints = browser.new_page(), []
    watch(page, complaints)
    page.goto(studio)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.head.append(script);
            return fetch("http://192.0.2.1/").catch(() => null);
        }"""
    )
    assert page.evaluate("window.ran") is None
    assert any("inline script" in each for each in complaints)
    assert any("192.0.2.1" in each for each in complaints)
    page.close()


def test_no_view_styles_what_another_view_styles() -> None:
    """All sheets become one: a rule is a view's own only if what its selector begins with is."""
    sheets = Path(__file__).parents[2] / "web/src/styles"
    roots: dict[str, str] = {}
    for view in ("plan", "live", "chat", "layout"):
        rules = re.findall(r"^\s*\.([\w-]+)[^{};]*[{,]$", (sheets / f"{view}.css").read_text(), re.MULTILINE)
        assert rules
        for root in set(rules):
            assert root not in roots, f".{root} is in {roots[root]}.css and in {view}.css"
            roots[root] = view
