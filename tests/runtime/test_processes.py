"""Ranks as processes: they disagree, raise or die loudly, and none is left behind.

Where their start or their parent's end is the subject they are started as Phalanx does, else forked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.errors import EngineDeadError, PhalanxError
from phalanx.runtime import executor, runner
from phalanx.runtime.executor import Executor
from phalanx.runtime.messages import Failure, pack_plan
from phalanx.runtime.workers import LocalWorkers
from tests.forked import ForkedPython

pytestmark = pytest.mark.slow

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT = list(range(1, 9))


def ranks_of(llm: LLM) -> dict[int, int]:
    """Process ids of the ranks beside this one."""
    runner = llm.engine.runner
    assert isinstance(runner, Executor)
    return {rank: process.pid for rank, process in runner.workers.processes.items()}


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(map(lives, pids)):
            return True
        time.sleep(0.05)
    return False


def run_until_death(llm: LLM) -> EngineDeadError:
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(PROMPT, LONG)
    return caught.value


@pytest.mark.usefixtures("forked_ranks")
def test_a_killed_rank_is_named_and_not_waited_for(tiny_llama: Path) -> None:
    """Rank 0 is in the middle of an answer and has no time-out: it would wait for the other's part for ever.

    The model drafts for itself, so all rows are rows of drafts.
    """
    with LLM(tiny_llama, tp=3, progress=False, speculate=str(tiny_llama), num_blocks=64) as llm:
        pids = ranks_of(llm)
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        llm.engine.add(PROMPT, LONG)
        for _ in range(5):
            llm.engine.step()
        assert speculation.totals.accepted_tokens
        os.kill(pids[2], signal.SIGKILL)
        error = run_until_death(llm)
        assert error.code == "rank_died"
        assert "Rank 2 was killed by signal 9" in error.found
        assert gone(list(pids.values()))
        with pytest.raises(EngineDeadError, match="Rank 2"):
            llm.generate(PROMPT, LONG)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_raises_is_named_with_its_traceback(tiny_llama: Path) -> None:
    """A damaged plan: rank 1 refuses it, and its own traceback reaches the caller."""
    with LLM(tiny_llama, tp=3, progress=False, num_blocks=64) as llm:
        pids, runner = ranks_of(llm), llm.engine.runner
        assert isinstance(runner, Executor)
        checksum, body = pack_plan(StepPlan(1, [], [0], [0], [1], [0], []))
        runner.workers.links.orders[1].send(checksum, body[:-1] + b"\x00")
        error = run_until_death(llm)
        assert error.code == "rank_failed"
        assert "Rank 1 raised ValueError: the plan of step 1 arrived damaged" in error.found
        assert "in unpack_plan" in error.found
        assert gone(list(pids.values()))


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_samples_other_tokens_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "digest", lambda tokens: 0)
    with LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as llm:
        error = run_until_death(llm)
        assert error.code == "fabric"
        assert "Ranks 0 and 1 differ in the tokens they sampled" in error.found
        assert gone(list(ranks_of(llm).values()))


@pytest.mark.usefixtures("forked_ranks")
def test_an_error_in_rank_0_ends_the_others(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as llm:
        pids, runner = ranks_of(llm), llm.engine.runner
        assert isinstance(runner, Executor)
        monkeypatch.setattr(runner.runner.model, "scores", lambda hidden: 1 / 0)
        error = run_until_death(llm)
        assert "Rank 0 raised ZeroDivisionError" in error.found
        assert gone(list(pids.values()))


@pytest.mark.usefixtures("forked_ranks")
def test_closing_leaves_no_process_and_no_folder(tiny_llama: Path) -> None:
    with LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Executor)
        pids, folder = list(ranks_of(llm).values()), runner.workers.folder
        assert folder.stat().st_mode & 0o077 == 0
    assert gone(pids)
    assert not folder.exists()


def test_no_rank_outlives_a_parent_killed_outright(tiny_llama: Path) -> None:
    """The parent is forked, its rank is started as Phalanx does."""
    reading, writing = os.pipe()
    parent = ForkedPython("tests.runtime.lasting_engine", str(tiny_llama), variables=dict(os.environ), stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        worker = int(told.readline())
    assert psutil.pid_exists(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone([worker])


def test_a_script_may_end_without_closing(tiny_llama: Path) -> None:
    script = (
        "import sys\nfrom phalanx import LLM\n"
        "llm = LLM(sys.argv[1], tp=2, progress=False)\n"
        "print(llm.engine.runner.workers.processes[1].pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_llama)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert gone([int(done.stdout)])


@pytest.mark.usefixtures("forked_ranks")
def test_two_engines_live_in_one_process(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with (
        LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as first,
        LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as second,
    ):
        answers = [llm.generate(PROMPT, params).token_ids for llm in (first, second, first)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_cannot_start_says_why(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 loads well, rank 1 finds no memory for a single block: its own words come back."""
    from phalanx.runtime.config import EngineConfig
    from phalanx.runtime.start import start_engine

    monkeypatch.setattr(executor, "blocks_that_fit", lambda config, model, spot: 100)
    config = EngineConfig(tp=2, kv_cache_memory=16)
    with pytest.raises(PhalanxError) as caught:
        start_engine(config, tiny_llama, progress=lambda done, total: None)
    assert caught.value.code == "kv_too_small"
    assert "rank 1" in str(caught.value)


def test_last_words_that_come_while_it_is_looked_are_heard(tmp_path: Path) -> None:
    """A rank writes why it failed and ends, between two looks of who asks for the cause."""
    failure = Failure(1, "ValueError: too hot", "Traceback", echo=False)

    class Ending:
        def poll(self) -> int:
            workers._failure_file(1).write_bytes(msgspec.json.encode(failure))
            return 1

    workers = object.__new__(LocalWorkers)
    workers.folder = tmp_path
    workers.processes = {1: cast(Any, Ending())}
    cause = workers.cause_of_death()
    assert cause is not None
    assert cause.failure == failure
