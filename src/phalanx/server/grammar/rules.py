"""Tokens that an answer may or may not have, whatever its form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.engine.request import Matcher
from phalanx.errors import RequestError

Words = npt.NDArray[np.int32]


class TokenRules(msgspec.Struct, frozen=True):
    """`allowed` are the only tokens there may be, if given; no sequence of `banned` may come about."""

    allowed: list[int] | None = None
    banned: list[list[int]] = []


RULED = b"R"
_decode = msgspec.msgpack.Decoder(tuple[TokenRules, bytes | None]).decode


def with_rules(rules: TokenRules, grammar: bytes | None) -> bytes:
    """A grammar for the engine with rules beside it."""
    return RULED + msgspec.msgpack.encode((rules, grammar))


def rules_in(packed: bytes) -> tuple[TokenRules, bytes | None]:
    """What `with_rules` was given."""
    return _decode(packed[len(RULED) :])


class RuledMatcher:
    """Follows a grammar, if there is one, within rules of single tokens (see `phalanx.engine.request.Matcher`)."""

    def __init__(self, rules: TokenRules, vocab: int, inner: Matcher | None) -> None:
        self._inner = inner
        self._banned = rules.banned
        self._vocab = vocab
        self._longest = max(map(len, rules.banned), default=1)
        self._said: list[int] = []
        self._ever = word_mask(range(vocab) if rules.allowed is None else rules.allowed, vocab)
        self._look_ahead()

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def mask(self) -> bytes:
        return self._allowed.tobytes()

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        inner = self._inner.masks(drafts) if self._inner is not None else None
        said, masks = list(self._said), [self.mask()]
        for depth, draft in enumerate(drafts, start=1):
            if not masks[-1][draft // 8] >> draft % 8 & 1 or (inner is not None and depth >= len(inner)):
                break
            said.append(draft)
            allowed = self._behind(said, inner[depth] if inner is not None else None)
            if not allowed.any():
                break
            masks.append(allowed.tobytes())
        return masks

    def accept(self, token: int) -> None:
        self._said = [*self._said[-self._longest :], token]
        if self._inner is not None:
            self._inner.accept(token)
        if not self.finished:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._allowed = self._behind(self._said, self._inner.mask() if self._inner is not None else None)
        if not self._allowed.any():
            raise RequestError(
                "no_token_allowed",
                "allowed_token_ids, bad_words and the form of the answer leave no token that could follow.",
                "Allow more: the token that ends an answer, for one.",
            )

    def _behind(self, said: list[int], inner: bytes | None) -> Words:
        allowed = self._ever if inner is None else self._ever & np.frombuffer(inner, np.int32)
        begun = [words for words in self._banned if said[max(0, len(said) - len(words) + 1) :] == words[:-1]]
        return allowed & ~word_mask([words[-1] for words in begun], self._vocab) if begun else allowed


def word_mask(tokens: Iterable[int], size: int) -> Words:
    """One bit a token, 32 in a word."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
