"""Where grammars are tried out before the engine sees them: a process that the server can do without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phalanx.errors import ConfigError, PhalanxError, RequestError
from phalanx.server import forked
from phalanx.server.grammar.constraint import Constraint, to_xgrammar
from phalanx.server.grammar.matcher import Grammars
from phalanx.server.grammar.messages import (
    CompilerAssignment,
    CompilerReady,
    NoGrammar,
    Proven,
    decode_assignment,
    decode_constraint,
    encode,
)
from phalanx.text.tokenizer import Tokenizer

_TOKENS_WALKED = 256


def main() -> None:
    """Answer in processes forked from this one, which has read the vocabulary."""
    sockets, message = forked.read_start()
    assignment = decode_assignment(message)
    try:
        grammars = _prepare(assignment)
    except PhalanxError as error:
        forked.say_ready(encode(NoGrammar(**error.to_dict())))
        return
    forked.say_ready(encode(CompilerReady()))
    ends = assignment.eos_token_ids
    forked.serve(sockets, assignment.lanes, lambda body: encode(_answer(grammars, decode_constraint(body), ends)))


def _prepare(assignment: CompilerAssignment) -> Grammars:
    tokenizer = Tokenizer.load(Path(assignment.model_path))
    if tokenizer is None:
        raise ConfigError("no_tokenizer", "The model has no tokenizer.json.", "Grammars need one.")
    return Grammars(tokenizer, assignment.vocab, assignment.eos_token_ids)


def _answer(grammars: Grammars, constraint: Constraint, ends: Sequence[int]) -> Proven | NoGrammar:
    try:
        grammar = grammars.pack(to_xgrammar(constraint))
        walk(grammars, grammar, ends)
        return Proven(grammar)
    except RequestError as error:
        return NoGrammar(**error.to_dict())
    except (MemoryError, RecursionError) as error:
        found = f"The grammar takes too much to compile ({type(error).__name__})."
        return NoGrammar("grammar_too_complex", found, "Write it with fewer alternatives and smaller repetitions.")


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
