"""Ranks that stop, die, raise, get no order or are not heard: each is named with its layer and its collective."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.hang import Hang
from phalanx.errors import EngineDeadError
from phalanx.runtime.executor import Executor
from phalanx.runtime.stacks import last_stacks_of
from phalanx.server.hang_watch import HangWatch
from tests.faults import FAULT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@contextmanager
def watched(model: Path, tp: int) -> Iterator[tuple[LLM, Executor, HangWatch]]:
    """An engine with a request, and somebody who watches it."""
    with LLM(model, tp=tp, progress=False, max_model_len=160) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Executor)
        llm.engine.add([1, 2, 3], LONG)
        watch = HangWatch(runner.workers.folder)
        watch._pages = runner.workers.pages
        yield llm, runner, watch


def stepping(llm: LLM) -> threading.Thread:
    """Makes the steps until they are done or fail."""

    def steps() -> None:
        with suppress(EngineDeadError):
            while llm.engine.has_work:
                llm.engine.step()

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    return thread


def named(watch: HangWatch, code: str, ranks: list[int], *words: str) -> Hang:
    """What the watch says once nothing moves any more. Before, ranks that get no time may look as if they stood, and be
    elsewhere in the end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        asyncio.run(watch.look({}, set(), here=True))
        hang = watch.hang
        if hang is not None and (hang.code, hang.ranks) == (code, ranks) and all(each in hang.found for each in words):
            return hang
        time.sleep(0.2)
    raise AssertionError(f"no {code} of {ranks} with {words} was named, but {watch.hang}")


@pytest.mark.parametrize("tp", [2, 4])
def test_a_stopped_rank_and_a_lost_order(tiny_llama: Path, tp: int) -> None:
    with watched(tiny_llama, tp) as (llm, runner, watch):
        last = runner.workers.processes[tp - 1]
        for _ in range(5):
            llm.engine.step()
        os.kill(last.pid, signal.SIGSTOP)
        thread = stepping(llm)
        named(watch, "rank_stopped", [tp - 1], "Rank 0 waits: step 6, the embedding, in all-reduce")
        assert "_serve" in last_stacks_of(last.pid, watch._folder, tp - 1)
        thread.join(60)
        assert not llm.engine.has_work
        assert asyncio.run(watch.look({}, set(), here=True)) is watch.hang is None

        llm.engine.add([1, 2, 3], LONG)
        runner.workers.links.orders[1].send = lambda *frames: None  # type: ignore[method-assign]
        step = llm.engine.totals.steps + 1
        stepping(llm)
        idle = f"Rank 1 has not begun step {step}: idle behind step {step - 1}"
        hang = named(watch, "order_lost", [1], idle, f"Rank 0 waits: step {step}, the embedding, in all-reduce")
        assert "receive" in hang.stack


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_that_is_not_heard_any_more(tiny_llama: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on to the next meeting and waits there for the others, who never see that it was at the last one."""
    monkeypatch.setenv(FAULT, "mute 1@45")
    with watched(tiny_llama, tp) as (llm, _, watch):
        stepping(llm)
        first = "Rank 0 waits though all others have arrived: step 5, layer 2 (mixer), in all-reduce 45."
        last = "Rank 1 waits: step 5, layer 2 (FFN), in all-reduce 46."
        hang = named(watch, "message_lost", [rank for rank in range(tp) if rank != 1], first, last)
        assert hang.found.endswith(last)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_that_is_killed_or_raises(tiny_llama: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(tiny_llama, tp) as (llm, runner, _):
        for _ in range(5):
            llm.engine.step()
        os.kill(runner.workers.processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="Rank 1 was killed by signal 9") as caught:
            llm.generate([1, 2, 3], LONG)
        assert re.search("It was at: (idle behind step 5|step 5, the head, in gather)", caught.value.found)
        assert "Rank 0 waits: step 6, the embedding, in all-reduce" in caught.value.found
    monkeypatch.setenv(FAULT, "raise 1@2")
    with watched(tiny_llama, tp) as (llm, _, _):
        with pytest.raises(EngineDeadError, match="Rank 1 raised AttributeError") as caught:
            llm.generate([1, 2, 3], LONG)
        first = caught.value.found.splitlines()[0]
        assert "It was at: step 1, layer 2 (FFN), behind all-reduce" in first
        assert "Rank 0 waits: step 1, layer 2 (FFN), in all-reduce" in first
