"""How Phalanx starts processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

Process = subprocess.Popen[bytes]


def command(module: str) -> list[str]:
    """This Python running a module, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module]


def environment(**more: str) -> dict[str, str]:
    """This process's, with this very Phalanx first on the path."""
    return with_phalanx(os.environ) | more


def with_phalanx(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables, with this very Phalanx first on the path."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def start(module: str, line: bytes, variables: dict[str, str]) -> Process:
    """Run a module that reads one line from its standard input, and ends when that is closed."""
    process = subprocess.Popen(command(module), stdin=subprocess.PIPE, env=variables)
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    return process
