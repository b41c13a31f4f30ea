"""The chat with the default model of a real engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from phalanx.weights.checkpoint import locate
from tests.server.running import Server, eventually, running
from tests.web.browser import NewPage, next_frame

pytestmark = pytest.mark.slow

PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a small KV cache: gigabytes of zeros take ten seconds to write."""
    options = ("--tp", "1", "--served-model-name", "SmolLM2-135M-Instruct", "--kv-cache-memory", str(2**28))
    with running(locate(None), tmp_path_factory.mktemp("chat"), *options) as started:
        yield started


@pytest.fixture
def page(new_page: NewPage, server: Server) -> Page:
    page = new_page(refused=(400, 500, 503))
    page.goto(f"{server.url}/#/chat")
    expect(page.get_by_label("Message", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    page.get_by_label("Temperature", exact=True).fill("0")
    return page


def ask(page: Page, text: str, longest: int) -> None:
    page.get_by_label("Longest answer", exact=True).fill(str(longest))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Page) -> None:
    next_frame(page)
    expect(page.get_by_role("button", name=re.compile("Regenerate|Try again"))).to_be_visible(timeout=PATIENCE_MS)


GROWTH = """() => {
    window.lengths = new Set();
    const look = () => window.lengths.add(document.querySelector(".md")?.textContent.length ?? 0);
    new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


def test_the_default_models_answer_grows_before_the_readers_eyes(page: Page, server: Server) -> None:
    page.evaluate(GROWTH)
    with server.braked():
        ask(page, "What is the capital of France? Tell me about its history.", 16)
        finished(page)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("Paris")
    assert len(page.evaluate("[...window.lengths]")) > 3

    page.keyboard.press("Alt+r")
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text(re.compile(r"cached [1-9]"), timeout=PATIENCE_MS)
    expect(answer).to_contain_text("Paris")
    expect(answer).to_have_count(1)


def test_stop_ends_the_request_in_the_engine_too(page: Page, server: Server) -> None:
    ask(page, "Write a very long story about the sea.", 2048)
    expect(page.locator(".md")).not_to_be_empty(timeout=PATIENCE_MS)
    assert server.health().json()["requests"] == 1
    page.keyboard.press("Escape")
    expect(page.get_by_role("article", name="Answer")).to_contain_text("stopped")
    assert eventually(lambda: server.health().json()["requests"] == 0, 60)
    ask(page, "Hello", 16)
    finished(page)


def test_probabilities_of_a_real_answer(page: Page) -> None:
    page.get_by_label("Token probabilities").check()
    ask(page, "What is the capital of France?", 16)
    finished(page)
    tokens = page.get_by_role("group", name="Tokens of this answer").get_by_role("button")
    assert "Paris" in "".join(tokens.all_text_contents())
    tokens.filter(has_text="Paris").first.hover()
    expect(page.get_by_role("tooltip").locator(".alternative")).to_have_count(5)
    shares = [
        float(each.rstrip(" %").replace(",", "")) for each in page.locator(".alternative .value").all_inner_texts()
    ]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 101


def test_too_long_a_question_is_told_and_stays(page: Page) -> None:
    ask(page, "word " * 20_000, 16)
    expect(page.get_by_role("alert")).to_contain_text("tokens, the context is", timeout=PATIENCE_MS)
    expect(page.get_by_role("article", name="You")).to_contain_text("word word")


def test_a_lost_engine_is_told_in_place(page: Page, server: Server) -> None:
    ask(page, "Write a very long story about the sea.", 2048)
    expect(page.locator(".md")).not_to_be_empty(timeout=PATIENCE_MS)
    server.engine().kill()
    expect(page.get_by_role("alert")).to_be_visible(timeout=PATIENCE_MS)
    assert page.get_by_role("alert").inner_text().strip()
    expect(page.get_by_role("article", name="You")).to_contain_text("Write a very long story")
    expect(page.locator(".md")).not_to_be_empty()
