"""Structured output in the engine: grammars compiled for a tokenizer, and the matchers that walk them."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xgrammar

from phalanx.engine.request import Matcher
from phalanx.errors import RequestError
from phalanx.server.grammar.rules import RULED, RuledMatcher, rules_in, word_mask
from phalanx.text.tokenizer import Tokenizer

_CACHE_BYTES = 256 * 2**20
_MOST_BYTES = 16 * 2**20
_QUICK_S = 0.25
_AS_TAG, _COMPILED = b"T", b"C"
_BUDGET_S = 1.0
_BUDGET_PER_TOKEN_S = 0.002
_WHERE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?")
_WRONG_SECONDS = {
    b"\xe0": [bytes([byte]) for byte in range(0x80, 0xA0)],
    b"\xed": [bytes([byte]) for byte in range(0xA0, 0xC0)],
    b"\xf0": [bytes([byte]) for byte in range(0x80, 0x90)],
    b"\xf4": [bytes([byte]) for byte in range(0x90, 0xC0)],
}
"""Bytes that begin a character in UTF-8, and those that would make it too long a form, half a pair or no character."""
_NO_UTF8 = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]")

Words = npt.NDArray[np.int32]
"""One bit a token, 32 in a word."""


@dataclass(frozen=True)
class Vocabulary:
    """What each token adds to a text, and which tokens take care.

    Special tokens add nothing, as in `Tokenizer.decode`: no grammar allows them. xgrammar lets some bytes follow each
    other that no text in UTF-8 has: tokens with such bytes are out, and `misfits` says what must not follow a token.
    """

    info: xgrammar.TokenizerInfo
    ends: Words
    misfits: Mapping[int, Words]

    @classmethod
    def read(cls, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        stops, added = list(eos_token_ids), tokenizer.backend.added_tokens_decoder
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.backend, vocab_size=size, stop_token_ids=stops or None
        )
        pieces = found.decoded_vocab
        for token, piece in enumerate(pieces):
            if (token in added and added[token].special) or _NO_UTF8.search(piece):
                pieces[token] = b""
        wrong = {
            first: word_mask((token for token, piece in enumerate(pieces) if piece[:1] in seconds), size)
            for first, seconds in _WRONG_SECONDS.items()
        }
        return cls(
            xgrammar.TokenizerInfo(
                pieces, vocab_size=size, stop_token_ids=stops, add_prefix_space=found.add_prefix_space
            ),
            ends=word_mask(stops, size),
            misfits={token: wrong[piece[-1:]] for token, piece in enumerate(pieces) if piece[-1:] in wrong},
        )


class Grammars:
    """The grammars of one tokenizer: compiles them, and keeps those used last. Threads may share it, and run beside it.

    xgrammar's own cache is not used: it shares parts between grammars and at times gives one the masks of another.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = Vocabulary.read(tokenizer, vocab, eos_token_ids)
        self._compiler = xgrammar.GrammarCompiler(self._vocabulary.info, max_threads=1, cache_enabled=False)
        self._kept: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def pack(self, tag: str) -> bytes:
        """An xgrammar structural tag made ready for `matcher`, in another process too: compiled if that takes long."""
        started = time.process_time()
        compiled = self._compile(tag)
        if time.process_time() - started < _QUICK_S:
            packed = _AS_TAG + tag.encode()
            self._keep(packed, compiled)
            return packed
        packed = _COMPILED + compiled.serialize_json().encode()
        if len(packed) > _MOST_BYTES:
            raise _too_complex(f"takes {len(packed)} bytes when compiled; {_MOST_BYTES} are allowed")
        return packed

    def matcher(self, packed: bytes) -> Matcher:
        """A matcher at the grammar's beginning; every answer needs its own. RequestError if the grammar is no good."""
        if not packed.startswith(RULED):
            return self._grammar_matcher(packed)
        rules, grammar = rules_in(packed)
        inner = self._grammar_matcher(grammar) if grammar is not None else None
        return RuledMatcher(rules, self._vocabulary.info.vocab_size, inner)

    def _grammar_matcher(self, packed: bytes) -> GrammarMatcher:
        with self._lock:
            compiled = self._kept.get(packed)
        if compiled is None:
            text = packed[1:].decode()
            is_compiled = packed.startswith(_COMPILED)
            info = self._vocabulary.info
            compiled = xgrammar.CompiledGrammar.deserialize_json(text, info) if is_compiled else self._compile(text)
        self._keep(packed, compiled)
        return GrammarMatcher(compiled, self._vocabulary)

    def _compile(self, tag: str) -> xgrammar.CompiledGrammar:
        try:
            return self._compiler.compile_structural_tag(tag)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            reason = _WHERE_IN_XGRAMMAR.sub("", str(error)).strip()
            raise RequestError("bad_grammar", f"The grammar cannot be used: {reason}", "Correct it.") from error

    def _keep(self, packed: bytes, compiled: xgrammar.CompiledGrammar) -> None:
        with self._lock:
            self._kept[packed] = compiled
            self._kept.move_to_end(packed)
            while len(self._kept) > 1 and sum(each.memory_size_bytes for each in self._kept.values()) > _CACHE_BYTES:
                self._kept.popitem(last=False)


class GrammarMatcher:
    """Walks a compiled grammar token by token (see `phalanx.engine.request.Matcher`).

    A step through a grammar costs microseconds; one made to be slow would hold up every other request. So a matcher has
    a budget of time that grows with its tokens, and gives up when it has spent it. What drafts take is paid from one of
    their own: when that is spent there are none.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocabulary = vocabulary
        self._allowed = np.zeros((1, len(vocabulary.ends)), np.int32)
        self._left_s = self._left_for_drafts_s = _BUDGET_S
        self.finished = False
        self._look_ahead()
        if not self._allowed.any():
            raise _dead_end()

    def mask(self) -> bytes:
        return self._allowed.tobytes()

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        if self._left_for_drafts_s < 0:
            return [self.mask()]
        started, allowed, masks, walked = time.thread_time(), self._allowed.copy(), [self.mask()], 0
        for draft in drafts:
            if not masks[-1][draft // 8] >> draft % 8 & 1 or not self._matcher.accept_token(draft):
                break
            walked += 1
            try:
                self._look_ahead(draft)
            except RequestError:
                break
            if self.finished:
                break
            masks.append(self.mask())
        self._matcher.rollback(walked)
        self._allowed, self.finished = allowed, False
        self._left_for_drafts_s -= time.thread_time() - started
        return masks

    def accept(self, token: int) -> None:
        started = time.thread_time()
        if not self._matcher.accept_token(token):
            raise RequestError(
                "grammar_violated", f"Token {token} is not what the grammar allows here.", "Report this as a bug."
            )
        self._look_ahead(token)
        self._left_s += _BUDGET_PER_TOKEN_S - (time.thread_time() - started)
        self._left_for_drafts_s += _BUDGET_PER_TOKEN_S
        if self._left_s < 0:
            raise _too_complex(
                f"took more than {_BUDGET_S:g} s and {_BUDGET_PER_TOKEN_S * 1000:g} ms a token to follow"
            )

    def _look_ahead(self, last: int = -1) -> None:
        """Find out what may come next; a text that is complete and cannot grow is finished, with or without its end."""
        if self._matcher.is_terminated():
            self.finished = True
            return
        self._matcher.fill_next_token_bitmask(self._allowed)
        if last in self._vocabulary.misfits:
            self._allowed &= ~self._vocabulary.misfits[last]
        if not (self._allowed & ~self._vocabulary.ends).any():
            if not self._matcher.is_completed():
                raise _dead_end()
            self.finished = True


def _too_complex(why: str) -> RequestError:
    return RequestError(
        "grammar_too_complex",
        f"The grammar {why}.",
        "Write it with fewer alternatives that begin alike, and with smaller repetitions.",
    )


def _dead_end() -> RequestError:
    return RequestError(
        "grammar_dead_end",
        "The grammar leads to a place where no token of this model can follow.",
        "Check that every rule of it can come to an end.",
    )
