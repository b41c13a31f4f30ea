"""How Phalanx starts processes of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import phalanx


def command(module: str) -> list[str]:
    """This Python running a module, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module]


def environment(**more: str) -> dict[str, str]:
    """This process's, with this very Phalanx first on the path."""
    source = str(Path(phalanx.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
