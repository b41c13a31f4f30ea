"""Who was killed for its service's limit of memory is told so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.runtime.memory_limit import _over_its_limit, fix_of, left


@pytest.mark.parametrize(
    ("events", "limit", "words"),
    [
        ("low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n", "4000000000\n", "4.0 GB .* killed 2 of its"),
        ("oom 0\noom_kill 0\n", "4000000000\n", None),
        ("oom 1\noom_kill 1\n", "max\n", None),
        ("", "4000000000\n", None),
    ],
    ids=["killed", "not killed", "no limit", "no books"],
)
def test_the_kernels_books_are_read(tmp_path: Path, events: str, limit: str, words: str | None) -> None:
    group = tmp_path / "system.slice" / "phalanx.service"
    group.mkdir(parents=True)
    (group / "memory.events").write_text(events)
    (group / "memory.max").write_text(limit)
    (tmp_path / "own").write_text("1:cpu:/\n0::/system.slice/phalanx.service\n")
    told = _over_its_limit(tmp_path / "own", tmp_path)
    assert told is None if words is None else re.search(words, told or "")


def test_elsewhere_signal_9_is_a_hint_and_other_ends_are_not(tmp_path: Path) -> None:
    assert _over_its_limit(tmp_path / "nothing", tmp_path) is None
    assert fix_of(-11) is None
    assert "memory" in (fix_of(-9) or "")


def test_what_the_limits_leave(tmp_path: Path) -> None:
    """The tightest of a group and those around it, with what the kernel would give up of files."""
    group = tmp_path / "system.slice" / "phalanx.service"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/system.slice/phalanx.service\n")
    assert left(tmp_path / "own", tmp_path) is None
    for folder, limit, used in ((group, "max", 700), (group.parent, "3000", 1500)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 400\nfile 300\ninactive_file 200\nactive_file 100\n")
    assert left(tmp_path / "own", tmp_path) == 1700
    (group / "memory.max").write_text("1000\n")
    assert left(tmp_path / "own", tmp_path) == 500
    (group / "memory.current").write_text("5000\n")
    assert left(tmp_path / "own", tmp_path) == 1
    assert left(tmp_path / "nothing", tmp_path) is None
