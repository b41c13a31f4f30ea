"""What the server and the processes that read its requests say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.engine.sampling import SamplingParams
from phalanx.server.forked import Lane
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.parsers import ToolSchema

QUICK, LARGE = 0, 1
LANES = (Lane(cpu_s=2.0), Lane(cpu_s=20.0, niceness=5))
"""Small requests do not wait for large ones."""

RequestKind = Literal["chat", "completion", "tokenize", "detokenize"]


class Assignment(msgspec.Struct, frozen=True):
    """The model whose requests are read. `templates` are its chat templates by name, as transformers has them."""

    name: str
    tokenizer: str
    templates: dict[str, str]
    special_tokens: dict[str, str | list[str]]
    vocab: int
    context: int
    tool_parser: str | None


class ReaderReady(msgspec.Struct, frozen=True):
    """Requests can be read. Of a chat template that cannot be used, `bad_template` says why."""

    bad_template: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """A request's body, as it came."""

    kind: RequestKind
    body: bytes


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """What a request for an answer comes to. `thinking` is whether its prompt ends within a thought, or after one.

    `echoes` has what goes before the answers to each prompt; `unknown` are fields nobody reads.
    """

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    salt: str | None
    constraint: Constraint | None
    tools: list[ToolSchema]
    most_calls: int
    thinking: bool | None
    echoes: list[str]
    unknown: list[str]


class TokenizedText(msgspec.Struct, frozen=True, tag=True):
    tokens: list[int]


class DetokenizedText(msgspec.Struct, frozen=True, tag=True):
    text: str


class Problem(msgspec.Struct, frozen=True, tag=True):
    """The fields of an ApiError. `trace` is for the log: of a mistake that is the server's own."""

    status: int
    message: str
    code: str
    param: str | None = None
    trace: str = ""


ReadRequest = Prepared | TokenizedText | DetokenizedText | Problem

encode = msgspec.msgpack.encode
decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
decode_ready = msgspec.msgpack.Decoder(ReaderReady).decode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_outcome = msgspec.msgpack.Decoder(ReadRequest).decode
