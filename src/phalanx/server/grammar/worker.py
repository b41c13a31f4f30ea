"""Where grammars are tried out before the engine sees them: a process that the server can do without."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phalanx.errors import ConfigError, PhalanxError, RequestError
from phalanx.runtime.grammar import Grammars
from phalanx.server.grammar.constraint import Constraint, to_xgrammar
from phalanx.server.grammar.messages import (
    LENGTH_BYTES,
    Assignment,
    Proven,
    Ready,
    Refused,
    decode_assignment,
    decode_constraint,
    packed,
)
from phalanx.text.tokenizer import Tokenizer

_NICENESS = 10
_TOKENS_WALKED = 256
_GRACE_S = 5


def main() -> None:
    """Answer until standard input ends. What libraries print goes to standard error, not among the answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    assignment = decode_assignment(_read(sys.stdin.buffer))
    try:
        grammars = _prepare(assignment)
    except PhalanxError as error:
        answers.write(packed(Refused(**error.to_dict())))
        return
    answers.write(packed(Ready()))
    while body := _read(sys.stdin.buffer):
        signal.alarm(int(assignment.time_limit_s) + _GRACE_S)
        answers.write(packed(_answer(grammars, decode_constraint(body), assignment.eos_token_ids)))
        signal.alarm(0)


def _read(stream: BinaryIO) -> bytes:
    """The next message; empty at the end."""
    return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "little"))


def _prepare(assignment: Assignment) -> Grammars:
    tokenizer = Tokenizer.load(Path(assignment.model_path))
    if tokenizer is None:
        raise ConfigError("no_tokenizer", "The model has no tokenizer.json.", "Grammars need one.")
    grammars = Grammars(tokenizer, assignment.vocab, assignment.eos_token_ids)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + assignment.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    return grammars


def _answer(grammars: Grammars, constraint: Constraint, ends: Sequence[int]) -> Proven | Refused:
    try:
        grammar = grammars.pack(to_xgrammar(constraint))
        walk(grammars, grammar, ends)
        return Proven(grammar)
    except RequestError as error:
        return Refused(**error.to_dict())
    except (MemoryError, RecursionError) as error:
        found = f"The grammar takes too much to compile ({type(error).__name__})."
        return Refused("grammar_too_complex", found, "Write it with fewer alternatives and smaller repetitions.")


def walk(grammars: Grammars, grammar: bytes, ends: Sequence[int]) -> None:
    """Make texts by the grammar, as a model would: RequestError if one comes to a dead end or takes too long."""
    rng, left = random.Random(0), _TOKENS_WALKED
    while left > 0:
        matcher = grammars.matcher(grammar)
        while left > 0 and not matcher.finished:
            allowed = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
            allowed[list(ends)] = 0
            tokens = np.flatnonzero(allowed)
            matcher.accept(int(tokens[rng.randrange(len(tokens))] if rng.random() < 0.5 else tokens[0]))
            left -= 1
        left -= 1


if __name__ == "__main__":
    main()
