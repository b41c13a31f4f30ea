"""`pytest --quick`: of the parts that were changed all tests but the slow ones, and of these the ones that stand beside
what was changed. A part is a folder of `src/phalanx` with its folder of `tests`. Tests of the whole, which are in no
folder, run always. Where something was changed that all stand on, one test of each file shows that it still stands."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SOURCES, _TESTS = _ROOT / "src/phalanx", _ROOT / "tests"


def leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], object]) -> None:
    left_out = {item for item in items if unwanted(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def leave_out_unneeded(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[Path] = set()

    def unneeded(item: pytest.Item) -> bool:
        slow = item.get_closest_marker("slow") is not None
        first = not slow and item.path not in seen
        if first:
            seen.add(item.path)
        return not is_needed(item.path, slow, first, changed_files())

    leave_out(config, items, unneeded)


@cache
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


def is_needed(test: Path, slow: bool, first: bool, changed: list[Path]) -> bool:
    """Whether a test has a say about these changes; `first` is the first quick one of its file."""
    if slow:
        return test in changed or _mirrored(test) in changed
    if test.parent == _TESTS or _part(test) in map(_part, changed):
        return True
    shared = [path for path in changed if _is_shared(path)]
    return bool(shared) and (first or any(_imports(test, path) for path in shared))


def may_be_needed(file: Path, changed: list[Path]) -> bool:
    """Whether any of its tests is, before they are known."""
    return any(is_needed(file, slow, True, changed) for slow in (True, False))


def _imports(test: Path, helper: Path) -> bool:
    """Fixtures and figures of `conftest.py` are everybody's."""
    is_one = helper.parent == _TESTS and helper.name != "conftest.py"
    return is_one and re.search(rf"\btests(\.| import ){helper.stem}\b", test.read_text()) is not None


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
