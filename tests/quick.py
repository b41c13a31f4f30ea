"""`pytest --quick`: all tests but the slow ones, and of these the ones that stand beside what was changed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


def leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], object]) -> None:
    left_out = {item for item in items if unwanted(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def changed_files() -> list[Path]:
    """Those that differ from where this branch left main, and those that git does not know yet."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    return [
        _ROOT / name for name in (*_git("diff", "--name-only", base[0]), *_git("ls-files", "-o", "--exclude-standard"))
    ]


def _git(*words: str) -> list[str]:
    """What it says line by line; nothing where it is not there or does not know."""
    try:
        return subprocess.run(
            ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def is_of(test: Path, changed: list[Path]) -> bool:
    """Whether it was changed, or what it mirrors: `runtime/test_grammar.py` is of `runtime/grammar.py`."""
    mirrored = _ROOT / "src/phalanx" / test.relative_to(_ROOT / "tests").parent / test.name.removeprefix("test_")
    return test in changed or mirrored in changed
