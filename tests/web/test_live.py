"""The live view in a browser, in front of a real server under load, and through the deaths of its engine."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from phalanx.trace import perfetto
from phalanx.trace.timeline import steps_of
from tests.ports import free_port
from tests.server.conftest import tiny_chat
from tests.server.running import Server, eventually, running
from tests.web.browser import NewPage, check_accessible

pytestmark = pytest.mark.slow

__all__ = ["tiny_chat"]

LONG = {"prompt": "abc", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
PATIENT_MS = 180_000


@pytest.fixture(scope="module")
def server(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks, and an engine that may die a few times."""
    options = ("--tp", "2", "--served-model-name", "tiny", "--max-num-seqs", "8", "--restart", "5")
    with running(tiny_chat, tmp_path_factory.mktemp("live"), *options) as started:
        yield started


@contextmanager
def load(server: Server, clients: int = 3) -> Iterator[None]:
    """Clients that ask again and again until the end."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as answer:
                    for _ in answer.iter_lines():
                        if over.is_set():
                            break
            except httpx.HTTPError:
                over.wait(0.5)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def events(server: Server, count: int, key: str | None = None) -> list[dict[str, Any]]:
    """The first events of a new stream."""
    found: list[dict[str, Any]] = []
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("GET", server.url + "/cockpit/live", headers=headers, timeout=30) as answer:
        answer.raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                return found
    return found


def card(page: Page, title: str) -> Locator:
    return page.locator("section.card", has=page.get_by_role("heading", name=re.compile(f"^{title}")))


def figure(page: Page, title: str, label: str) -> float:
    """The number shown for a line; nothing is 0."""
    text = card(page, title).locator(".figure", has_text=label).first.locator("dd").inner_text()
    found = re.match(r"[\d.,]+", text)
    return float(found[0].replace(",", "")) if found else 0.0


def drawn(page: Page, title: str) -> int:
    """Pixels of a chart in a strong colour: its lines, not its grid nor the shade of an outage."""
    return (
        card(page, title)
        .locator("canvas")
        .first.evaluate(
            """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
                const [red, green, blue, opaque] = data.slice(i, i + 4);
                if (opaque > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) count++;
            }
            return count;
        }"""
        )
    )


def status(page: Page) -> Locator:
    return page.get_by_label("State of the engine")


def open_live(page: Page, server: Server) -> None:
    page.goto(server.url + "/#/live")
    expect(status(page)).to_contain_text("Ready", timeout=PATIENT_MS)


def test_figures_and_charts_follow_the_load(server: Server, new_page: NewPage) -> None:
    page = new_page()
    open_live(page, server)
    before = drawn(page, "Output")
    with load(server):
        assert eventually(lambda: figure(page, "Output", "output") > 0, 60)
        assert eventually(lambda: figure(page, "Requests", "running") > 1, 60)
        assert eventually(lambda: figure(page, "Time between tokens", "p99") > 0, 60)
        assert eventually(lambda: figure(page, "Time to first token", "p50") > 0, 60)
        assert eventually(lambda: figure(page, "Step time by rank", "all-reduce") > 0, 60)
        assert eventually(lambda: drawn(page, "Output") > before + 20, 60)
        assert eventually(lambda: drawn(page, "Step time by rank") > 0, 60)
    assert eventually(lambda: figure(page, "Requests", "running") == 0, 60)


def test_a_reload_shows_what_was_before_it(server: Server, new_page: NewPage) -> None:
    with load(server):
        assert eventually(lambda: any(sample["out"] for sample in events(server, 1)[0]["samples"]), 60)
    page = new_page()
    open_live(page, server)
    known = len(events(server, 1)[0]["samples"])
    page.reload()
    expect(status(page)).to_contain_text("Ready", timeout=PATIENT_MS)
    assert eventually(lambda: int(page.get_by_label("Figures of").get_attribute("max") or 0) >= known - 1)
    assert eventually(lambda: drawn(page, "Output") > 20)


def _told_by_both(server: Server) -> list[Any]:
    """What both ranks told in some second in which a step was planned, and not only ended."""
    samples = (sample["ranks"] for sample in events(server, 1)[0]["samples"])
    return [ranks for ranks in samples if len(ranks) == 2 and all(ranks) and ranks[0][0][0]]


def test_every_rank_tells_where_its_time_goes(server: Server) -> None:
    with load(server):
        assert eventually(lambda: _told_by_both(server), 60)
    ranks = _told_by_both(server)[-1]
    (first, first_busy), (second, second_busy) = ranks
    schedule, launch, device, all_reduce, sample = range(5)
    assert second[schedule] == 0
    for parts in (first, second):
        assert min(parts[launch], parts[device], parts[all_reduce], parts[sample]) > 0
    assert 0 < min(first_busy, second_busy) <= max(first_busy, second_busy) <= 1


def test_a_trace_is_taken_shown_and_saved(server: Server, new_page: NewPage, tmp_path: Path) -> None:
    page = new_page()
    page.goto(server.url + "/#/trace")
    with load(server):
        page.get_by_label("Steps").select_option("4")
        page.get_by_role("button", name="Trace").click()
        expect(page.get_by_role("img", name=re.compile(r"step \d+: rank 0 waited .*, rank 1 waited"))).to_be_visible()
    parts = page.get_by_role("region", name="Parts of decode steps")
    expect(parts.get_by_role("rowheader", name="attention")).to_be_visible()
    expect(parts.get_by_role("rowheader", name="exchange")).to_be_visible()
    assert page.locator(".trace-line rect.wait, .trace-line rect.exchange").count() > 5
    step = page.locator("output[for=trace-step]").inner_text()
    page.get_by_label("Step", exact=True).press("ArrowLeft")
    expect(page.locator("output[for=trace-step]")).not_to_have_text(step)
    check_accessible(page)
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save for Perfetto").click()
    saved.value.save_as(tmp_path / "trace.json")
    assert len(steps_of(perfetto.read(tmp_path / "trace.json"))) == 4


def test_nothing_moves_while_figures_change(server: Server, new_page: NewPage) -> None:
    page = new_page()
    page.add_init_script(
        """window.moved = 0;
        new PerformanceObserver(list => {
            for (const entry of list.getEntries()) window.moved += entry.value;
        }).observe({ type: "layout-shift", buffered: true });"""
    )
    open_live(page, server)
    with load(server):
        assert eventually(lambda: figure(page, "Output", "output") > 0, 60)
        page.wait_for_timeout(3000)
    assert page.evaluate("window.moved") < 0.02


def test_a_killed_engine_is_told_with_its_reason_and_its_return_too(server: Server, new_page: NewPage) -> None:
    page = new_page()
    open_live(page, server)
    with load(server):
        assert eventually(lambda: figure(page, "Output", "output") > 0, 60)
        with server.braked():
            server.engine().kill()
            alarm = status(page).get_by_role("alert")
            expect(alarm).to_contain_text("The engine died", timeout=PATIENT_MS)
            expect(alarm).to_contain_text("killed by signal 9")
            expect(alarm).to_contain_text("dmesg")
            expect(page.locator(".rank .tag").first).to_contain_text("gone")
            check_accessible(page)
        expect(status(page)).to_contain_text("Ready", timeout=2 * PATIENT_MS)
        assert eventually(lambda: figure(page, "Output", "output") > 0, 60)
    samples = events(server, 1)[0]["samples"]
    ups = [sample["up"] for sample in samples]
    assert False in ups[ups.index(True) :], "the outage is part of the history"
    assert min(sample["out"] for sample in samples) >= 0


def test_a_lost_server_is_told_and_found_again(tiny_chat: Path, tmp_path: Path, browser: Browser) -> None:
    port = free_port()
    page = browser.new_page()
    with running(tiny_chat, tmp_path, "--port", str(port)) as server:
        open_live(page, server)
        server.engine().kill()
        assert server.process.wait(60) == 1, "the stream must not keep the server from ending"
        expect(status(page)).to_contain_text("The server does not answer, trying again", timeout=PATIENT_MS)
        expect(status(page)).to_contain_text("killed by signal 9")
    with running(tiny_chat, tmp_path, "--port", str(port)):
        expect(status(page)).to_contain_text("Ready", timeout=PATIENT_MS)
    page.close()


def test_streams_end_with_their_clients(server: Server) -> None:
    before = events(server, 1)[0]["state"]["viewers"]
    clients = []
    for _ in range(50):
        client = socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 80))
        client.sendall(b"GET /cockpit/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        clients.append(client)
    assert eventually(lambda: events(server, 1)[0]["state"]["viewers"] == before + 50)
    for client in clients:
        client.close()
    assert eventually(lambda: events(server, 1)[0]["state"]["viewers"] == before)
