"""What a measuring process is told, and what it reports back, one line of JSON each."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

DeviceKind = Literal["cpu", "cuda"]
Task = Literal["rates", "all-reduce"]


class MeasureAssignment(Struct, frozen=True):
    """One rank's work. Ranks meet in `folder`; `seed` is the same for all, `threads` None leaves torch's choice."""

    task: Task
    device: DeviceKind
    rank: int
    ranks: int
    folder: str
    seed: int
    threads: int | None = None


class Alive(Struct, frozen=True, tag=True):
    """The process runs, whatever it waits for."""


class Began(Struct, frozen=True, tag=True):
    """Sent before everything that could hang."""

    what: str


class Rated(Struct, frozen=True, tag=True):
    """What this rank's device does: GB/s read and written by a copy, TFLOP/s of a product by number format."""

    device: str
    uuid: str | None
    copy_gbs: float
    matmul_tflops: dict[str, float]


class Timed(Struct, frozen=True, tag=True):
    """The median all-reduce of this size, as this rank saw it."""

    size: int
    microseconds: float


class Checked(Struct, frozen=True, tag=True):
    """One sum: how many of its numbers are wrong, its checksum, and the checksum that the right sum has."""

    size: int
    round: int
    wrong: int
    checksum: int
    expected: int


class Failed(Struct, frozen=True, tag=True):
    """This rank raised. An echo only says that some peer is gone."""

    error: str
    echo: bool


class Finished(Struct, frozen=True, tag=True):
    """This rank has done its work and waits to be let go."""


MeasureReport = Alive | Began | Rated | Timed | Checked | Failed | Finished
report_decoder = msgspec.json.Decoder(MeasureReport)


def written(size: int) -> str:
    """A size in bytes, for a person: 8 KiB, 64 MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
