"""Facts in a file: what `--record` writes and `--facts` judges."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.doctor.facts import Facts
from phalanx.errors import PhalanxError

_VERSION = 1
_MOST_BYTES = 64 * 2**20


class FactsError(PhalanxError):
    """The file does not hold the facts of a machine."""

    def __init__(self, path: Path, reason: str, fix: str = "Write one with `phalanx doctor --record`.") -> None:
        super().__init__("bad_facts", f"{path} cannot be read as facts: {reason}.", fix)


class _Versioned(msgspec.Struct):
    version: int = _VERSION


def write_facts(path: Path, facts: Facts) -> None:
    """As indented JSON, for people too. The file is either whole or not there."""
    text = msgspec.json.format(msgspec.json.encode(facts), indent=2)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(text + b"\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FactsError(
            path, f"it cannot be written: {error.strerror}", "Choose a folder that you may write."
        ) from None


def read_facts(path: Path) -> Facts:
    """Refuses a file that is damaged, comes from elsewhere or contradicts itself, and names the field."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FactsError(path, f"it is larger than {_MOST_BYTES >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise FactsError(path, (error.strerror or str(error)).lower()) from None
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != _VERSION:
            raise FactsError(path, f"it has version {version}, and this Phalanx reads {_VERSION}", "Update Phalanx.")
        facts = msgspec.json.decode(content, type=Facts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FactsError(path, str(error)) from None
    if reason := _contradiction(facts):
        raise FactsError(path, reason)
    return facts


def _contradiction(facts: Facts) -> str | None:
    indices = [gpu.index for gpu in facts.gpus]
    if len(set(indices)) < len(indices):
        return "$.gpus holds one index twice"
    pairs = [frozenset((path.a, path.b)) for path in facts.paths]
    for i, path in enumerate(facts.paths):
        if path.a not in indices or path.b not in indices:
            return f"$.paths[{i}] joins GPU {path.a} and GPU {path.b}, which $.gpus does not hold"
    if len(set(pairs)) < len(pairs):
        return "$.paths joins the same GPUs twice"
    return None
