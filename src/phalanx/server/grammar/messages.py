"""What the server and its grammar compiler say to each other."""

from __future__ import annotations

import msgspec

from phalanx.server.forked import Lane
from phalanx.server.grammar.constraint import Constraint


class CompilerAssignment(msgspec.Struct, frozen=True):
    """The first thing the compiler is told: whose grammars to compile, and what that may cost."""

    model_path: str
    vocab: int
    eos_token_ids: list[int]
    lanes: list[Lane]


class CompilerReady(msgspec.Struct, frozen=True, tag=True):
    """The compiler knows the tokenizer and waits for constraints."""


class Proven(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles, can be walked through, and costs little."""

    grammar: bytes


class NoGrammar(msgspec.Struct, frozen=True, tag=True):
    """Why there is no grammar: the fields of a PhalanxError."""

    code: str
    found: str
    fix: str


CompilerReply = CompilerReady | Proven | NoGrammar

encode = msgspec.msgpack.encode
decode_assignment = msgspec.msgpack.Decoder(CompilerAssignment).decode
decode_constraint = msgspec.msgpack.Decoder(Constraint).decode
decode_reply = msgspec.msgpack.Decoder(CompilerReply).decode
