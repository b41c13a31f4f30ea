"""What the engine and its ranks say to each other: msgspec records, never pickles."""

from __future__ import annotations

from zlib import crc32

import msgspec

from phalanx.engine.marks import RankTrace
from phalanx.engine.step_plan import Beat, StepPlan
from phalanx.models.adapter import AdapterOrder
from phalanx.runtime.channel import Keys
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, Spot


class Meeting(msgspec.Struct, frozen=True):
    """Where a rank meets the engine and the other ranks.

    It binds `orders`, connects to `reports` and `beats`, finds the other ranks through `store` and talks to them from
    `host`. Where the engine's `beacon` is given, it ends when it no longer sees it.
    """

    orders: str
    reports: str
    beats: str
    store: str
    host: str
    beacon: str | None = None


class RankAssignment(msgspec.Struct, frozen=True):
    """The one line a worker reads from its standard input. If it fails, it leaves a Failure in the file `failure`.
    Where it is in a step stands in the file `pages`, on the engine's own machine.

    Between machines, `keys` are its own and `engine_key` is the one it trusts.
    """

    config: EngineConfig
    model_path: str
    rank: int
    spot: Spot
    meeting: Meeting
    token: str
    failure: str = ""
    pages: str = ""
    keys: Keys | None = None
    engine_key: str | None = None


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its share, and takes its orders there."""

    rank: int
    orders: str


class CacheRoom(msgspec.Struct, frozen=True, tag=True):
    """A rank has memory for this many KV blocks."""

    rank: int
    blocks: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step; the marks are digests of what all ranks must have alike, the last of its tokens."""

    rank: int
    step: int
    marks: list[int]


class Short(msgspec.Struct, frozen=True, tag=True):
    """A rank had no memory for a step. Before it gave up it had begun so many collectives."""

    rank: int
    calls: int
    found: str
    fix: str


class Failure(msgspec.Struct, frozen=True):
    """Why a rank stopped. `echo` says that it only lost a peer: the cause lies elsewhere."""

    rank: int
    error: str
    traceback: str
    echo: bool
    code: str | None = None
    found: str | None = None
    fix: str | None = None


class Pong(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a ping: what its clock says, in ns."""

    rank: int
    time: int


RankReport = RankReady | CacheRoom | Done | Short | RankTrace | Pong

GO_ON = [b"go on"]
"""An order: no rank had memory for the last step, and all gave it up at the same point."""

TEND = [b"tend"]
"""An order: do the next piece of what was put off. Every rank has put off the same."""

SUSPECT = [b"suspect"]
"""An order: ranks disagreed on a step; look at every layer of the next ones."""

FIND_BREAK = b"find break"
"""An order, with slot and position: find where the numbers of this token cease to be finite."""

TRACE, END_TRACE, PING = [b"trace"], [b"end trace"], [b"ping"]
"""Orders between steps: write down what follows; tell it; say what your clock says."""

CONNECT = [b"connect"]
"""An order: all ranks have loaded; meet them."""

ADAPT = b"adapt"
"""The first frame of an order about an adapter."""

report_decoder = msgspec.msgpack.Decoder(RankReport)
beat_decoder = msgspec.msgpack.Decoder(Beat)
encode = msgspec.msgpack.encode


def pack_plan(plan: StepPlan) -> list[bytes]:
    """A plan with its checksum, as two frames."""
    body = encode(plan)
    return [crc32(body).to_bytes(4, "little"), body]


def pack_adapter(order: AdapterOrder) -> list[bytes]:
    return [ADAPT, encode(order)]


def unpack_adapter(frames: list[bytes]) -> AdapterOrder | None:
    """The order, if it is one about an adapter."""
    return msgspec.msgpack.decode(frames[1], type=AdapterOrder) if frames[0] == ADAPT else None


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
