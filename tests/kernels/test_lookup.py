"""The kernels that look tokens up find what their definitions find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_tokens_and_places_are_those_of_the_definition() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.interpreted_lookup"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
