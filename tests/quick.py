"""`pytest --quick`: of the parts that were changed all tests but the slow ones, and of these the ones that stand beside
what was changed. A part is a folder of `src/phalanx` with its folder of `tests`. Tests of the whole, which are in no
folder, run always."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SOURCES, _TESTS = _ROOT / "src/phalanx", _ROOT / "tests"


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


def is_needed(test: Path, slow: bool, changed: list[Path]) -> bool:
    """Whether a test file has a say about these changes."""
    if slow:
        return test in changed or _mirrored(test) in changed
    if test.parent == _TESTS or any(_is_shared(path) for path in changed):
        return True
    return _part(test) in map(_part, changed)


def _mirrored(test: Path) -> Path:
    """`runtime/test_grammar.py` is of `runtime/grammar.py`."""
    return _SOURCES / test.relative_to(_TESTS).parent / test.name.removeprefix("test_")


def _is_shared(path: Path) -> bool:
    """What tests of all parts stand on: helpers of theirs, and the packages that are installed."""
    return path.name in ("pyproject.toml", "constraints.txt") or (
        path.parent == _TESTS and not path.name.startswith("test_")
    )


def _part(path: Path) -> str | None:
    root = next((root for root in (_SOURCES, _TESTS) if path.is_relative_to(root)), None)
    return path.relative_to(root).parts[0].removesuffix(".py") if root is not None else None
