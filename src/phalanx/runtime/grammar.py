"""Structured output in the engine: grammars compiled for a tokenizer, and the matchers that walk them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from phalanx.errors import RequestError
from phalanx.text.tokenizer import Tokenizer

_CACHE_BYTES = 256 * 2**20
_BUDGET_S = 1.0
_BUDGET_PER_TOKEN_S = 0.002
_WHERE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?")


class Grammars:
    """Compiles grammars for one tokenizer and keeps those used last. Threads may share it, and run while it works.

    A grammar is an xgrammar structural tag as JSON, as `phalanx.server.grammar` makes it. To compile one takes some ten
    milliseconds, less if another was like it, but seconds if it counts the characters of long strings.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_token_ids: Sequence[int]) -> None:
        info = _read_vocabulary(tokenizer, vocab, eos_token_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        ends = np.zeros(-(-vocab // 32) * 32, np.uint8)
        ends[list(eos_token_ids)] = 1
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)

    def matcher(self, grammar: bytes) -> GrammarMatcher:
        """A matcher at the grammar's beginning; every answer needs its own. RequestError if it is no good."""
        try:
            compiled = self._compiler.compile_structural_tag(grammar.decode())
        except RuntimeError as error:
            reason = _WHERE_IN_XGRAMMAR.sub("", str(error)).strip()
            raise RequestError("bad_grammar", f"The grammar cannot be used: {reason}", "Correct it.") from error
        return GrammarMatcher(compiled, self._ends)


def _read_vocabulary(tokenizer: Tokenizer, vocab: int, eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """What each token adds to a text. Special tokens add nothing, as in `Tokenizer.decode`: no grammar allows them."""
    backend, stops = tokenizer.backend, list(eos_token_ids)
    found = xgrammar.TokenizerInfo.from_huggingface(backend, vocab_size=vocab, stop_token_ids=stops or None)
    pieces = found.decoded_vocab
    for token, added in backend.added_tokens_decoder.items():
        if added.special and token < len(pieces):
            pieces[token] = b""
    return xgrammar.TokenizerInfo(
        pieces, vocab_size=vocab, stop_token_ids=stops, add_prefix_space=found.add_prefix_space
    )


class GrammarMatcher:
    """Walks a compiled grammar token by token (see `phalanx.engine.request.Matcher`).

    A step through a grammar costs microseconds; one made to be slow would hold up every other request. So a matcher has
    a budget of time that grows with its tokens, and gives up when it has spent it.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, ends: npt.NDArray[np.int32]) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._ends = ends
        self._allowed = np.zeros((1, len(ends)), np.int32)
        self._left_s = _BUDGET_S
        self.finished = False
        self._look_ahead()
        if not self._allowed.any():
            raise _dead_end()

    def mask(self) -> bytes:
        return self._allowed.tobytes()

    def accept(self, token: int) -> None:
        started = time.thread_time()
        if not self._matcher.accept_token(token):
            raise RequestError(
                "grammar_violated", f"Token {token} is not what the grammar allows here.", "Report this as a bug."
            )
        self._look_ahead()
        self._left_s += _BUDGET_PER_TOKEN_S - (time.thread_time() - started)
        if self._left_s < 0:
            raise RequestError(
                "grammar_too_complex",
                f"The grammar took more than {_BUDGET_S:g} s and {_BUDGET_PER_TOKEN_S * 1000:g} ms a token to follow.",
                "Write it with fewer alternatives that begin alike, and with smaller repetitions.",
            )

    def _look_ahead(self) -> None:
        """Find out what may come next; a text that is complete and cannot grow is finished, with or without its end."""
        if self._matcher.is_terminated():
            self.finished = True
            return
        self._matcher.fill_next_token_bitmask(self._allowed)
        if not (self._allowed & ~self._ends).any():
            if not self._matcher.is_completed():
                raise _dead_end()
            self.finished = True


def _dead_end() -> RequestError:
    return RequestError(
        "grammar_dead_end",
        "The grammar leads to a place where no token of this model can follow.",
        "Check that every rule of it can come to an end.",
    )
