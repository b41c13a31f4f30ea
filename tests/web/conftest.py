"""A studio and a scripted server for tests of pages, and the browser's fixtures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.forked import forked_popen
from tests.web.browser import browser, context, new_page
from tests.web.scripted import ScriptedServer, scripted_server

__all__ = ["browser", "context", "new_page", "studio"]


@pytest.fixture(scope="package")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as started:
        yield started


@pytest.fixture
def server(scripted: ScriptedServer) -> ScriptedServer:
    """Says what the test tells it to; one for all tests."""
    scripted.reset()
    return scripted


@pytest.fixture(scope="package")
def studio() -> Iterator[str]:
    """The address of a running `phalanx studio`: see `patient_studio.py`."""
    command = [sys.executable, "-P", "-m", "tests.web.patient_studio", "studio", "--port", "0"]
    with open(os.devnull, "wb") as nowhere:
        process = forked_popen(command, dict(os.environ), nowhere)
    try:
        line = process.stdout.readline().decode()
        assert "http://" in line, f"the studio did not start: {line!r}"
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(30)
