"""What the API process and the engine process say to each other."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs
from phalanx.engine.marks import StepTraces
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.speculation import SpeculationTotals
from phalanx.engine.step_plan import Beat, Totals
from phalanx.runtime.config import EngineConfig


class Startup(msgspec.Struct, frozen=True):
    """The one line an engine process reads from its standard input."""

    config: EngineConfig
    folder: str
    token: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    id: int
    prompt: list[int]
    params: SamplingParams
    salt: str | None = None
    grammar: bytes | None = None
    owner: str = ""
    adapter: str | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class TraceAsked(msgspec.Struct, frozen=True, tag=True):
    """Write down the next steps, of all ranks."""

    id: int
    steps: int


class EndTrace(msgspec.Struct, frozen=True, tag=True):
    """Tell what there is of this trace, if it has not been told."""

    id: int


class ResetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget all prefixes that no request uses now."""


class ChangeAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter from a folder, or, without one, unload it. Settled or Refused follows."""

    id: int
    name: str
    folder: str | None = None


Order = Submit | Cancel | ResetPrefixes | ChangeAdapter | TraceAsked | EndTrace


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights loaded so far, and in all."""

    done: int
    total: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests, within these sizes. `device` is `cpu` or the GPU's own name.

    `nodes` are the machines of its ranks, if not all on this one.
    """

    vocab: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    stop_tokens: list[int]
    device: str = "cpu"
    nodes: list[str] = []


class NewToken(msgspec.Struct, array_like=True, frozen=True):
    """A token of request `id`, with what the engine's `Output` says of it."""

    id: int
    token: int
    finish_reason: str | None
    cached_tokens: int
    queued_s: float
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None
    drafted: tuple[int, int] = (0, 0)


class Books(msgspec.Struct, array_like=True, frozen=True):
    """The scheduler's counts after a step. Of the free blocks, the idle ones still hold a prefix."""

    running: int
    waiting: int
    free_blocks: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    totals: Totals
    idle_blocks: int = 0
    speculation: SpeculationTotals = msgspec.field(default_factory=SpeculationTotals)


class Stepped(msgspec.Struct, frozen=True, tag=True):
    tokens: list[NewToken]
    books: Books


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request the engine will not run."""

    id: int
    code: str
    found: str
    fix: str


class Settled(msgspec.Struct, frozen=True, tag=True):
    """An order that was asked about is done."""

    id: int


class Pulses(msgspec.Struct, frozen=True, tag=True):
    """Signs of life that have arrived from the ranks."""

    beats: list[Beat]


class Death(msgspec.Struct, frozen=True):
    """Why the engine ended: left behind in a file, since sockets end with their process."""

    code: str
    found: str
    fix: str


class Traced(msgspec.Struct, frozen=True, tag=True):
    """None if this engine's ranks cannot be traced."""

    id: int
    traces: StepTraces | None


EngineReport = Loading | Started | Stepped | Refused | Settled | Pulses | Traced

encode = msgspec.msgpack.encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(EngineReport).decode


def death_file(folder: Path) -> Path:
    return folder / "death.json"


def orders_address(folder: Path) -> str:
    return f"ipc://{folder}/api-orders"


def reports_address(folder: Path) -> str:
    return f"ipc://{folder}/api-reports"
