"""Grammars in the engine: whatever is wrong with one, the engine goes on."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.engine.sampling import SamplingParams
from phalanx.errors import RequestError
from phalanx.server.grammar.engine_thread import GrammarThread
from phalanx.server.messages import Submit
from tests.server.running import eventually


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), AssertionError(), RuntimeError("of xgrammar")])
def test_a_mistake_while_compiling_is_that_request_s_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(vocab=10, scheduler=SimpleNamespace(eos_token_ids=[1]))
    thread = GrammarThread(Path(), engine)

    def broken(grammar: bytes) -> Any:
        raise error

    monkeypatch.setattr(thread, "_matcher", broken)
    order = Submit(7, [1], SamplingParams(), None, b"T{}")
    thread.compile(order)
    ready: list[Any] = []
    assert eventually(lambda: ready.extend(thread.ready()) or ready)
    ((told, outcome),) = ready
    assert told is order
    assert isinstance(outcome, RequestError)
    assert outcome.code == "grammar_failed"
    assert type(error).__name__ in outcome.found
    assert not thread.busy


def test_a_tokenizer_that_is_being_read_already_is_there_before_the_first_grammar() -> None:
    """The path leads nowhere: all comes from what was read ahead."""
    from phalanx.text.tokenizer import Tokenizer
    from phalanx.weights.checkpoint import locate

    read: Future[Any] = Future()
    read.set_result(Tokenizer.load(locate(None)))
    engine: Any = SimpleNamespace(vocab=49152, scheduler=SimpleNamespace(eos_token_ids=[2]))
    thread = GrammarThread(Path("/nowhere"), engine, read)
    thread.warm_up()
    assert thread._grammars is not None
    cold = GrammarThread(Path("/nowhere"), engine)
    cold.warm_up()
    assert cold._grammars is None
