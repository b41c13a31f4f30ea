"""Host: where facts are read. Files lie below a root and one function runs commands, so that tests can lend both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import PhalanxError

_SECONDS = 20.0
_MOST_BYTES = 4 * 2**20


class CommandError(PhalanxError):
    """A command is not installed, failed or did not end in time. `output` is what it printed."""

    def __init__(self, found: str, output: str = "") -> None:
        super().__init__("command_failed", found, "")
        self.output = output


def run_command(arguments: Sequence[str], seconds: float = _SECONDS) -> str:
    """What a command prints. It gets no terminal, and speaks English whatever the user's language is."""
    program = shutil.which(arguments[0])
    if program is None:
        raise CommandError(f"{arguments[0]} is not installed.")
    try:
        done = subprocess.run(
            [program, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{arguments[0]} did not answer within {seconds:g} s.") from None
    except OSError as error:
        raise CommandError(f"{arguments[0]} could not be started: {error.strerror or error}.") from None
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip() or output.strip() or "nothing").splitlines()[0]
        raise CommandError(f"{arguments[0]} ended with {done.returncode} and said: {said[:200]}", output + said)
    return output


@dataclass(frozen=True)
class Host:
    """A machine to read: its files, its commands and its environment. `unread` collects what could not be read."""

    root: Path = Path("/")
    run: Callable[[Sequence[str], float], str] = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    unread: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str, end: bool = False) -> str | None:
        """A file's text, or the end of a long one, without white space around it; `None` where it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                if end:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
                return file.read(_MOST_BYTES).decode(errors="replace").strip().strip("\0")
        except (OSError, ValueError):
            return None

    def number(self, name: str) -> int | None:
        """A file that holds one whole number."""
        text = self.text(name) or ""
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder; no where this user may not even look."""
        return os.path.exists(self.path(name))

    def entries(self, name: str) -> list[str] | None:
        """The names in a folder, sorted; `None` where there is no such folder."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return None

    def command(self, *arguments: str, seconds: float = _SECONDS) -> str:
        return self.run(arguments, seconds)
