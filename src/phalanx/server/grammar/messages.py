"""What the server and its grammar compiler say to each other: msgspec records, each behind its length."""

from __future__ import annotations

import msgspec

from phalanx.server.grammar.constraint import Constraint

LENGTH_BYTES = 4


class Assignment(msgspec.Struct, frozen=True):
    """The first thing the compiler is told: whose grammars to compile, and what that may cost."""

    model_path: str
    vocab: int
    eos_token_ids: list[int]
    time_limit_s: float
    memory_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The compiler knows the tokenizer and waits for constraints."""


class Proven(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles, can be walked through, and costs little."""

    grammar: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no grammar: the fields of a PhalanxError."""

    code: str
    found: str
    fix: str


Reply = Ready | Proven | Refused

decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
decode_constraint = msgspec.msgpack.Decoder(Constraint).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def packed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
