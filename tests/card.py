"""A GPU that the tests of several workers share: one that takes all of its memory has it alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from pathlib import Path


@contextmanager
def on_the_card(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Who wants it alone keeps the door shut until all others have left."""
    place = folder or Path(tempfile.gettempdir())
    door_file, card_file = place / f"phalanx-door-{os.getuid()}", place / f"phalanx-card-{os.getuid()}"
    with door_file.open("w") as door, card_file.open("w") as card:
        flock(door, LOCK_EX)
        flock(card, LOCK_EX if alone else LOCK_SH)
        flock(door, LOCK_UN)
        yield
