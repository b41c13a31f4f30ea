"""Keys: who they belong to, what each may use, and how they are read anew while the server runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from phalanx.errors import ConfigError

_FORM = "Write a key first, then any of: name=NAME rpm=REQUESTS tpm=TOKENS priority=NUMBER admin."


@dataclass(frozen=True)
class Key:
    """A client of the server. Limits are a minute's; of two priorities the lower number is served first.

    An `operator` may do what concerns the clients of other keys too.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    operator: bool = False

    @property
    def client(self) -> str:
        """What stands for it inside the server: the key itself is not kept."""
        return self.digest.hex()[:32]


class KeyRing:
    """All keys: those given, and those in a file that may change. Empty if the server is open to all who reach it."""

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        if any(not key.strip() for key in given):
            raise _empty()
        self._given = [Key(f"flag-{number}", _digest(key)) for number, key in enumerate(given, 1)]
        self._file = file
        self._keys: dict[str, Key] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def several(self) -> bool:
        return len(self._keys) > 1

    def reload(self) -> None:
        """Read the file anew. ConfigError leaves the keys as they were."""
        read = _read(self._file) if self._file is not None else []
        self._keys = {key.client: key for key in (*self._given, *read)}

    def find(self, secret: bytes) -> Key | None:
        """All are compared, by digest, so that neither their lengths nor which it was shows in the time it takes."""
        given = hashlib.sha256(secret).digest()
        matches = [key for key in self._keys.values() if compare_digest(given, key.digest)]
        return matches[0] if matches else None

    def of(self, client: str) -> Key | None:
        return self._keys.get(client)

    def is_operator(self, key: Key) -> bool:
        """Who is alone concerns nobody else."""
        return key.operator or not self.several

    @property
    def ranked(self) -> bool:
        """Whether keys are served by their priorities, and not in equal parts."""
        return any(key.priority for key in self._keys.values())

    def priority(self, client: str, asked: int) -> int:
        """Where keys have priorities, a request can only put itself behind others of its own key's."""
        key = self._keys.get(client)
        return key.priority + max(asked, 0) if key is not None and self.ranked else asked


def _read(file: Path) -> list[Key]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError("bad_option", f"--api-key-file {file}: {reason}.", "Give a readable file.") from None
    keys = [_parse(file, number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if not keys:
        raise _empty()
    return keys


def _parse(file: Path, number: int, line: str) -> Key:
    """`KEY [name=NAME] [rpm=N] [tpm=N] [priority=N] [admin]`. What is wrong is told without the key."""
    secret, *words = line.split()
    told = {"name": f"line-{number}", "rpm": None, "tpm": None, "priority": "0"}
    operator = False
    for word in words:
        name, given, value = word.partition("=")
        if word == "admin":
            operator = True
        elif given and name in told and value:
            told[name] = value
        else:
            raise ConfigError("bad_key_file", f"{file}, line {number}: {word[:40]!r} is not understood.", _FORM)
    try:
        return Key(
            name=str(told["name"])[:64],
            digest=_digest(secret),
            requests_per_minute=_limit(told["rpm"]),
            tokens_per_minute=_limit(told["tpm"]),
            priority=int(str(told["priority"])),
            operator=operator,
        )
    except ValueError as error:
        raise ConfigError("bad_key_file", f"{file}, line {number}: {error}.", _FORM) from None


def _limit(text: str | None) -> int | None:
    if text is not None and int(text) < 1:
        raise ValueError(f"{text} is not a limit of at least 1")
    return None if text is None else int(text)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _empty() -> ConfigError:
    return ConfigError("bad_option", "An API key is empty.", "Give at least one character, or no key at all.")
