"""Commands are run without a terminal, in English, and not for ever; files are read as far as they can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.doctor.gather.host import CommandError, Host, run_command


def python(code: str, seconds: float = 60.0) -> str:
    return run_command([sys.executable, "-c", code], seconds)


def test_a_command_has_no_terminal_and_speaks_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    code = (
        "import os, sys; print(sys.stdin.read() == '', sys.stdin.isatty(), sys.stdout.isatty(), os.environ['LC_ALL'])"
    )
    assert python(code).split() == ["True", "False", "False", "C"]


def test_output_that_is_no_text_is_read_all_the_same() -> None:
    assert python("import sys; sys.stdout.buffer.write(b'a\\xffb')") == "a\ufffdb"


def test_a_command_that_is_missing_fails_or_hangs() -> None:
    with pytest.raises(CommandError, match="no-such-program is not installed"):
        run_command(["no-such-program"])
    with pytest.raises(CommandError, match="ended with 6 and said: it is broken") as failed:
        python("import sys; print('Field'); print('it is broken', file=sys.stderr); sys.exit(6)")
    assert "Field" in failed.value.output
    with pytest.raises(CommandError, match="ended with 1 and said: nothing"):
        python("raise SystemExit(1)")
    with pytest.raises(CommandError, match="did not answer within 0"):
        python("import time; time.sleep(60)", seconds=0.2)


def test_what_a_shell_would_read_is_only_an_argument() -> None:
    assert run_command([sys.executable, "-c", "import sys; print(sys.argv[1])", "$(id); `id`"]) == "$(id); `id`\n"


def test_files(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (tmp_path / "number").write_text(" -12\n")
    (tmp_path / "model").write_bytes(b"NVIDIA Jetson\0")
    (tmp_path / "long").write_text("9" * 5000)
    (tmp_path / "folder").mkdir()
    assert (host.number("/number"), host.number("/model"), host.number("/long"), host.number("/none")) == (
        -12,
        None,
        None,
        None,
    )
    assert (host.text("/model"), host.text("/none"), host.text("/folder")) == ("NVIDIA Jetson", None, None)
    assert (host.entries("/"), host.entries("/none")) == (["folder", "long", "model", "number"], None)


def test_of_a_long_file_the_end_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\n" + "x" * 5_000_000 + "\nlast\n")
    text = Host(tmp_path).text("/log", end=True)
    assert text is not None
    assert text.endswith("\nlast")
    assert "first" not in text
