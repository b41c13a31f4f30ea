"""Grammars in the engine process: compiled beside the steps."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.engine.core import Engine
from phalanx.engine.request import Matcher
from phalanx.errors import PhalanxError, RequestError
from phalanx.server.messages import Submit

if TYPE_CHECKING:
    from phalanx.server.grammar.matcher import Grammars
    from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger("phalanx.server")


def read_tokenizer(path: Path) -> Tokenizer:
    """Takes seconds, with what grammars need to be imported."""
    import phalanx.server.grammar.matcher  # noqa: F401
    from phalanx.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None, "a server has a tokenizer"
    return tokenizer


class GrammarThread:
    """Compiles grammars beside the steps: a new one takes longer than a step should.

    `tokenizer` is one that is being read already; else the first grammar has it read, and waits for it.
    """

    def __init__(self, path: Path, engine: Engine, tokenizer: Future[Tokenizer] | None = None) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._vocab = engine.vocab
        self._ends = sorted(engine.scheduler.eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._grammars: Grammars | None = None
        self._compiling: dict[int, tuple[Submit, Future[Matcher]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._compiling)

    def compile(self, order: Submit) -> None:
        self._compiling[order.id] = order, self._thread.submit(self._matcher, order.grammar or b"")

    def drop(self, id: int) -> None:
        self._compiling.pop(id, None)

    def ready(self) -> list[tuple[Submit, Matcher | PhalanxError]]:
        """Those that are done since the last call, with a matcher each or the reason why there is none."""
        done = [id for id, (_, matcher) in self._compiling.items() if matcher.done()]
        return [(order, _outcome(matcher)) for order, matcher in map(self._compiling.pop, done)]

    def warm_up(self) -> None:
        """Wait until grammars can be compiled, if their tokenizer is being read already."""
        if self._tokenizer is not None:
            self._thread.submit(self._ready_grammars).result()

    def _matcher(self, grammar: bytes) -> Matcher:
        return self._ready_grammars().matcher(grammar)

    def _ready_grammars(self) -> Grammars:
        """Only this thread comes here."""
        if self._grammars is None:
            tokenizer = read_tokenizer(self._path) if self._tokenizer is None else self._tokenizer.result()
            from phalanx.server.grammar.matcher import Grammars

            self._grammars = Grammars(tokenizer, self._vocab, self._ends)
        return self._grammars


def _outcome(matcher: Future[Matcher]) -> Matcher | PhalanxError:
    error = matcher.exception()
    if error is None:
        return matcher.result()
    if isinstance(error, PhalanxError):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    return RequestError(
        "grammar_failed",
        f"The engine could not compile the grammar ({type(error).__name__}); its log says why.",
        "Write it in another way.",
    )
