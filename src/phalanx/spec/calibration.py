"""Calibration: what one machine was measured to do, as `phalanx plan --calibration` reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.errors import PhalanxError


class CalibrationError(PhalanxError):
    """The calibration cannot be made, read or used for this machine."""


class GpuShare(Struct, frozen=True):
    """One GPU by its catalogue name: the shares of its datasheet that a copy and matrix products reached."""

    index: int
    name: str
    bandwidth: float
    bf16: float | None = None
    fp8: float | None = None

    def __post_init__(self) -> None:
        if not all(0 < share < 2 for share in (self.bandwidth, self.bf16, self.fp8) if share is not None):
            raise ValueError("a share of the datasheet lies between 0 and 2")


class AllReduceTimes(Struct, frozen=True):
    """All-reduces over `ranks`: microseconds by bytes, smallest first."""

    ranks: int
    sizes: tuple[int, ...]
    microseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.microseconds) or not self.sizes:
            raise ValueError("every size needs its time")
        if self.ranks < 2 or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("ranks are at least 2 and sizes grow")
        if not all(0 < time < 1e9 for time in self.microseconds):
            raise ValueError("a time is above 0 microseconds")


class Calibration(Struct, frozen=True):
    """A machine as measured. `date` is ISO 8601; `all_reduces` are NCCL's, fewest ranks first."""

    date: str
    machine: str
    host: str
    source: str
    gpus: tuple[GpuShare, ...] = ()
    all_reduces: tuple[AllReduceTimes, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1 or not self.gpus:
            raise ValueError("version 1 of a calibration has at least one GPU")
        ranks = [table.ranks for table in self.all_reduces]
        if ranks != sorted(set(ranks)):
            raise ValueError("rank counts grow")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise CalibrationError(
                "no_calibration", f"{path}: {error.strerror}.", "phalanx doctor --measure can write one."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CalibrationError(
                "bad_calibration", f"{path} is no calibration: {error}.", "Write it anew with phalanx doctor --measure."
            ) from error

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
