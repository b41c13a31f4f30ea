"""A studio and a scripted server for tests of pages, and the browser's fixtures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

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
    """The address of a running `phalanx studio`."""
    patient = "from phalanx.web.planner_lane import PlannerLane; PlannerLane.__init__.__defaults__ = (600.0,)"
    start = f"{patient}; from phalanx.cli import app; app()"
    command = [sys.executable, "-c", start, "studio", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, f"the studio did not start: {line!r}"
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(30)
