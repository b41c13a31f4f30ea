"""What the engine and its ranks say to each other: msgspec records over private unix sockets, never pickles."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import msgspec

from phalanx.engine.plan import Beat, StepPlan
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes


class Assignment(msgspec.Struct, frozen=True):
    """The one line a worker reads from its standard input."""

    config: EngineConfig
    model_path: str
    rank: int
    folder: str
    threads: int
    token: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its share and has memory for this many KV blocks."""

    rank: int
    blocks: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step; the digest is of the tokens it sampled."""

    rank: int
    step: int
    digest: int


class Failure(msgspec.Struct, frozen=True):
    """Why a rank stopped. `echo` says that it only lost a peer: the cause lies elsewhere."""

    rank: int
    error: str
    traceback: str
    echo: bool
    code: str | None = None
    found: str | None = None
    fix: str | None = None


Report = Ready | Done

report_decoder = msgspec.msgpack.Decoder(Report)
beat_decoder = msgspec.msgpack.Decoder(Beat)
encode = msgspec.msgpack.encode


def orders_address(folder: Path, rank: int) -> str:
    return f"ipc://{folder}/orders-{rank}"


def reports_address(folder: Path) -> str:
    return f"ipc://{folder}/reports"


def beats_address(folder: Path) -> str:
    return f"ipc://{folder}/beats"


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def pack_plan(plan: StepPlan) -> list[bytes]:
    """A plan with its checksum, as two frames."""
    body = encode(plan)
    return [crc32(body).to_bytes(4, "little"), body]


def unpack_plan(frames: list[bytes], expected_step: int) -> StepPlan:
    """The plan, if it is whole and the one that is due."""
    checksum, body = frames
    if crc32(body).to_bytes(4, "little") != checksum:
        raise ValueError(f"the plan of step {expected_step} arrived damaged (checksum differs)")
    plan = msgspec.msgpack.decode(body, type=StepPlan)
    if plan.step != expected_step:
        raise ValueError(f"step {plan.step} arrived, step {expected_step} was due")
    return plan


def unpack_sizes(frames: list[bytes]) -> Sizes:
    return msgspec.msgpack.decode(frames[0], type=Sizes)
