"""`--config`, `phalanx config show` and shell completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.web import serve as served

run = CliRunner().invoke

FILE = """
model = "some/model"
tp = 4
max_num_seqs = 32
api-key-file = "KEYS"
served-model-name = ["one", "two"]
prefix-caching = false
request-timeout = 12.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    path = tmp_path / "serve.toml"
    path.write_text(FILE.replace("KEYS", str(keys)))
    return path


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, Any]:
    """What a server would be started with."""
    given: list[Any] = []
    monkeypatch.setattr(served, "serve", lambda config, options: given.extend((config, options)) or 0)
    result = run(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    return given[0], given[1]


def test_the_file_stands_where_no_flag_does(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = started(monkeypatch, "--config", str(file), "--tp", "2", "--served-model-name", "mine")
    assert (config.model, config.tp, config.max_num_seqs, config.prefix_caching) == ("some/model", 2, 32, False)
    assert (options.served_names, options.request_timeout_s, len(options.keys)) == (("mine",), 12.5, 1)
    assert started(monkeypatch, "other", "--config", str(file))[0].model == "other"


def test_every_option_can_stand_in_a_file_and_what_is_shown_is_such_a_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(app, ["config", "show", "--config", str(file), "--port", "9000", "--api-key", "hush"]).output
    told = tomllib.loads(shown)
    assert (told["tp"], told["port"], told["prefix-caching"]) == (4, 9000, False)
    assert "tp = 4  # file" in shown
    assert "port = 9000  # flag" in shown
    assert "hush" not in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    config, options = started(monkeypatch, "--config", str(again))
    expected = started(monkeypatch, "--config", str(file), "--port", "9000")
    assert config == expected[0]
    assert options.served_names == expected[1].served_names
    help_text = run(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    known = set(told) | {line[2:].split()[0].strip(":") for line in shown.splitlines() if line.startswith("# ")}
    flags = set(re.findall(r"^ +--([\w-]+)", help_text, re.MULTILINE)) - {"help", "config"}
    assert len(flags) > 30
    assert flags <= known


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length = 3", "Did you mean max-model-len?"),
        ("tp = true", "tp is True"),
        ("prefix-caching = 1", "true or false"),
        ("model = {a = 1}", "text or number"),
        ("tp = ", "is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    result = run(app, ["serve", "--config", str(path)])
    assert result.exit_code == 1
    assert words in result.output.replace("\n", " ")


def test_the_shell_completes_commands_and_flags() -> None:
    def completed(line: str) -> list[str]:
        variables = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        script = "from phalanx.cli import app; app(prog_name='phalanx')"
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True, timeout=240
        )
        return done.stdout.split()

    assert completed("phalanx pul") == ["pull"]
    assert "--admin-port" in completed("phalanx serve --adm")
