"""Writes the cockpit's pictures: a real server of the default model on loopback, a little load, four views.

    python benchmarks/screenshots.py [--output docs/img]

Needs the system's Chromium and `pip install playwright`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

VIEWPORT = {"width": 1360, "height": 1000}
LOAD_S = 90
PLAN = "#/plan?model=Llama-3.3-70B&machine=4xH100-SXM"
LAYOUT = "#/layout?model=SmolLM2-135M&tp=2"
QUESTION = "What is the capital of France?"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run")


@contextmanager
def server() -> Iterator[str]:
    """The default model on two ranks, at a free port."""
    command = [sys.executable, "-m", "phalanx.cli", "serve", "--tp", "2", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r" at (http://\S+)/v1 ", line)
            if found:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


def load(url: str, clients: int, until: float) -> None:
    """A few clients, each asking one question after the other."""

    def ask(number: int) -> None:
        while time.monotonic() < until:
            body = {"messages": [{"role": "user", "content": f"{number}: {QUESTION}"}], "max_tokens": 60}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shoot_chat(page: Page, url: str) -> None:
    page.goto(f"{url}/#/chat")
    message = page.get_by_label("Message", exact=True)
    message.fill(QUESTION)
    message.press("Enter")
    page.get_by_text("tok/s").first.wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/img"))
    folder = parser.parse_args().output
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no Chromium is installed")
    folder.mkdir(parents=True, exist_ok=True)
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        page = browser.new_page(viewport=VIEWPORT, reduced_motion="reduce")
        page.set_default_timeout(120_000)
        loading = threading.Thread(target=load, args=(url, 4, time.monotonic() + LOAD_S))
        loading.start()
        page.goto(f"{url}/#/live")
        page.wait_for_timeout((LOAD_S - 5) * 1000)
        page.screenshot(path=folder / "cockpit_live.png", full_page=True)
        loading.join()
        shoot_chat(page, url)
        page.screenshot(path=folder / "cockpit_chat.png")
        for view, place in (("plan", PLAN), ("layout", LAYOUT)):
            page.goto(f"{url}/{place}")
            page.wait_for_timeout(4000)
            page.screenshot(path=folder / f"cockpit_{view}.png", full_page=view == "layout")
        browser.close()
    print(f"wrote the four views to {folder}")


if __name__ == "__main__":
    main()
