"""The process in which grammars are compiled: whatever a client sends, the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from phalanx.errors import ConfigError, RequestError
from phalanx.server import forked_client
from phalanx.server.fairness import Shares
from phalanx.server.grammar import compiler as module
from phalanx.server.grammar.compiler import GrammarCompiler
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.matcher import Grammars
from phalanx.server.grammar.messages import decode_constraint, encode
from tests.byte_model import EOS, VOCAB, make_tokenizer, random_text
from tests.server.running import eventually, pid_of

pytestmark = pytest.mark.slow

T = TypeVar("T")
LIMIT_S = 3.0
SMALL = Constraint("regex", "[ab]{3}")
SLOW = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {f"p{index}": {"type": "integer"} for index in range(400)},
            "minProperties": 100,
            "maxProperties": 200,
        }
    ),
)
"""So many ways to leave out properties that xgrammar takes minutes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that get no time are waited for: what ends a trial is the processor time that it took."""
    monkeypatch.setattr(forked_client, "_PATIENCE", 1000.0)


class Compiler:
    """A compiler with its loop, for tests that are not written in async."""

    def __init__(self, folder: Path, loop: asyncio.Runner) -> None:
        self.loop = loop
        self.real = GrammarCompiler(folder, VOCAB, [EOS], LIMIT_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    def compile(self, constraint: Constraint) -> bytes:
        return self.run(self.real.compile(constraint))

    def process(self) -> psutil.Process:
        """The one that the others are forked from."""

        async def pid() -> int:
            await self.real.start()
            return (await self.real._processes._started())[0].pid

        return psutil.Process(self.run(pid()))

    def workers(self) -> list[psutil.Process]:
        return self.process().children()


@pytest.fixture(scope="module")
def shared(folder: Path, loop: asyncio.Runner) -> Iterator[Compiler]:
    compiler = Compiler(folder, loop)
    compiler.run(compiler.real.start())
    yield compiler
    compiler.run(compiler.real.close())


@pytest.fixture
def compiler(shared: Compiler) -> Compiler:
    """The shared process, with nothing remembered."""
    shared.real._tried.clear()
    shared.real._tried_bytes = 0
    return shared


def refusal(compiler: Compiler, constraint: Constraint) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiler.compile(constraint)
    return caught.value


@pytest.fixture
def exchanged(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> list[Constraint]:
    """What was tried: first for a moment, whether or not that was enough."""
    asked: list[Constraint] = []
    real = compiler.real._processes.ask

    async def ask(lane: int, message: bytes) -> bytes:
        if lane == module.QUICK:
            asked.append(decode_constraint(message))
        return await real(lane, message)

    monkeypatch.setattr(compiler.real._processes, "ask", ask)
    return asked


def test_what_is_proven_is_what_the_engine_needs(compiler: Compiler, grammars: Grammars) -> None:
    text = random_text(grammars.matcher(compiler.compile(SMALL)), random.Random(0))
    assert text is not None
    assert re.fullmatch(b"[ab]{3}", text)


def test_refusals_come_back_as_they_are(compiler: Compiler) -> None:
    error = refusal(compiler, Constraint("json_schema", '{"type": "array", "uniqueItems": true}'))
    assert (error.code, error.found) == ("unsupported_schema", "#: uniqueItems cannot be enforced.")
    assert refusal(compiler, Constraint("grammar", 'root ::= "a" x\nx ::= x')).code == "grammar_dead_end"
    assert refusal(compiler, Constraint("grammar", 'root ::= (("a"*)*)*')).code == "grammar_too_complex"


def test_what_was_tried_is_remembered_refusals_too(compiler: Compiler, exchanged: list[Any]) -> None:
    bad = Constraint("regex", "(")
    for _ in range(3):
        assert compiler.compile(SMALL)
        assert refusal(compiler, bad).code == "bad_grammar"
    assert exchanged == [SMALL, bad]


def test_the_least_recently_used_is_forgotten(
    compiler: Compiler, exchanged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Constraint("regex", f"{name}{{3}}") for name in "abc")
    monkeypatch.setattr(module, "_CACHE_BYTES", 2 * (len(compiler.compile(first)) + len(first.source)))
    for constraint in (second, first, third, first, second):
        compiler.compile(constraint)
    assert exchanged == [first, second, third, second]
    assert compiler.real._tried_bytes == sum(module._size(*entry) for entry in compiler.real._tried.items())


def test_those_who_ask_for_the_same_share_one_trial(compiler: Compiler, exchanged: list[Any]) -> None:
    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(compiler.real.compile(SMALL) for _ in range(5)))

    assert len(set(compiler.run(all_at_once()))) == 1
    assert exchanged == [SMALL]


def test_one_who_gives_up_does_not_break_off_the_trial_of_another(compiler: Compiler, exchanged: list[Any]) -> None:
    async def one_of_two() -> bytes:
        impatient, patient = (asyncio.create_task(compiler.real.compile(SMALL)) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        return await patient

    assert compiler.run(one_of_two())
    assert exchanged == [SMALL]


def test_one_whom_all_have_left_is_broken_off(compiler: Compiler, exchanged: list[Constraint]) -> None:
    async def left() -> None:
        askers = [asyncio.create_task(compiler.real.compile(SLOW)) for _ in range(3)]
        while not exchanged:
            await asyncio.sleep(0)
        (trial,) = compiler.real._trials.values()
        for asker in askers:
            assert not trial.work.cancelled()
            asker.cancel()
            await asyncio.gather(asker, return_exceptions=True)
        await asyncio.gather(trial.work, return_exceptions=True)
        assert trial.work.cancelled()
        assert not compiler.real._trials
        assert await compiler.real.compile(SMALL)

    compiler.run(left())


def test_a_key_with_many_trials_does_not_hold_up_another(
    compiler: Compiler, exchanged: list[Constraint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four regexes of one client, of which each could take its ten seconds, and one of another."""
    monkeypatch.setattr(compiler.real, "_places", Shares(module._MOST_WAITING, shared=True))

    async def beside_each_other() -> None:
        crowd = [Constraint("regex", f"((a{{1,{count}}}){{1,99}}){{1,99}}") for count in range(40, 104)]
        asked = [asyncio.create_task(compiler.real.compile(regex, "greedy")) for regex in crowd]
        await asyncio.sleep(0)
        assert await compiler.real.compile(SMALL, "honest")
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    compiler.run(beside_each_other())
    assert exchanged.index(SMALL) <= 4


def test_a_key_cannot_have_all_places(folder: Path) -> None:
    async def filled() -> tuple[int, int]:
        compiler = GrammarCompiler(folder, VOCAB, [EOS], shared=True)
        counts = []
        for key in ("greedy", "honest"):
            count = 0
            with contextlib.suppress(RequestError):
                for count in range(module._MOST_WAITING + 1):
                    compiler._trial(Constraint("regex", f"{key}{count}"), key)
            counts.append(count)
        await compiler.close()
        return counts[0], counts[1]

    assert asyncio.run(filled()) == (48, 12)


def test_the_queue_is_bounded(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.real, "_places", Shares(3, shared=False))

    async def four_at_once() -> list[Any]:
        constraints = [Constraint("regex", f"x{{{count}}}") for count in range(1, 5)]
        return await asyncio.gather(*map(compiler.real.compile, constraints), return_exceptions=True)

    *well, last = compiler.run(four_at_once())
    assert all(isinstance(grammar, bytes) for grammar in well)
    assert isinstance(last, RequestError)
    assert last.code == "too_many_grammars"
    assert compiler.compile(SMALL)


def test_too_large_a_constraint_does_not_even_reach_the_process(compiler: Compiler, exchanged: list[Any]) -> None:
    assert refusal(compiler, Constraint("regex", "x" * 100_000)).code == "grammar_too_large"
    assert exchanged == []


def test_a_slow_grammar_ends_at_the_limit_and_those_behind_it_are_served(compiler: Compiler) -> None:
    """While they are, the process that is at it is stopped."""

    async def behind_each_other() -> tuple[Any, bool]:
        _, lines, _ = await compiler.real._processes._started()
        await compiler.real._processes.ask(module.SLOW, encode(SMALL))
        worker = psutil.Process(pid_of(lines[module.SLOW]._pid_fd))
        slow = asyncio.create_task(compiler.real.compile(SLOW))
        while lines[module.SLOW]._settled.is_set():
            await asyncio.sleep(0)
        worker.suspend()
        async with asyncio.timeout(60):
            assert await compiler.real.compile(SMALL)
        at_work = not slow.done()
        worker.resume()
        (error,) = await asyncio.gather(slow, return_exceptions=True)
        return error, at_work

    before = compiler.process()
    error, at_work = compiler.run(behind_each_other())
    assert error.code == "grammar_too_complex"
    assert f"{LIMIT_S:g} s" in error.found
    assert at_work
    assert compiler.process() == before
    assert eventually(lambda: len(compiler.workers()) == 2)


def test_a_process_that_dies_at_work_fails_that_grammar_alone(compiler: Compiler) -> None:
    async def killed_at_work() -> Any:
        work = asyncio.create_task(compiler.real.compile(Constraint(SLOW.kind, SLOW.source + " ")))
        while not work.done():
            for worker in psutil.Process((await compiler.real._processes._started())[0].pid).children():
                worker.kill()
            await asyncio.sleep(0.1)
        return (await asyncio.gather(work, return_exceptions=True))[0]

    assert compiler.run(killed_at_work()).code == "grammar_too_complex"
    assert compiler.compile(SMALL)


def test_a_process_that_dies_at_rest_is_replaced_unnoticed(compiler: Compiler) -> None:
    for worker in compiler.workers():
        worker.kill()
    assert compiler.compile(SMALL)
    compiler.real._tried.clear()
    gone = compiler.process()
    gone.kill()

    async def wait() -> None:
        while compiler.real._processes._starting is not None:
            await asyncio.sleep(0.01)

    compiler.run(wait())
    assert compiler.compile(SMALL)
    assert compiler.process() != gone


def test_its_memory_and_its_share_of_the_cpu_are_bounded(compiler: Compiler) -> None:
    compiler.process()
    for lane in (module.QUICK, module.SLOW):
        compiler.run(compiler.real._processes.ask(lane, encode(SMALL)))
    for worker in compiler.workers():
        most, _ = worker.rlimit(psutil.RLIMIT_AS)
        assert 0 < most - worker.memory_info().vms <= module._MEMORY_BYTES
        assert worker.nice() >= 10


HOSTILE = [
    Constraint("regex", "(" * 3000 + "a" + ")" * 3000),
    Constraint("regex", "((((((a{1,50}){1,50}){1,50}){1,50}){1,50}){1,50})"),
    Constraint("regex", "a{1000000000}"),
    Constraint("regex", "\x00\ud7ff"),
    Constraint("regex", "|".join("a" * count for count in range(1, 300))),
    Constraint("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    Constraint("grammar", 'root ::= ((("a"{1,1000}){1,1000}){1,1000})'),
    Constraint("grammar", 'root ::= "' + "\\x" * 1000),
    Constraint("grammar", "root ::= root"),
    Constraint("json_schema", '{"type":"array","items":' * 500 + "{}" + "}" * 500),
    Constraint(
        "json_schema",
        json.dumps(
            {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)} | {"1500": {}}, "$ref": "#/$defs/0"}
        ),
    ),
    Constraint("json_schema", json.dumps({"enum": ["x" * 30_000, "y"]})),
    Constraint("json_schema", json.dumps({"type": "array", "minItems": 10**9})),
    Constraint(
        "structural_tag",
        json.dumps({"format": {"type": "repeat", "min": 10**9, "max": -1, "content": {"type": "any_text"}}}),
    ),
    Constraint("structural_tag", json.dumps({"format": {"type": "token", "token": 10**9}})),
    Constraint("structural_tag", json.dumps({"format": {"type": "or", "elements": [7, None, "x"]}})),
]


def test_no_hostile_constraint_takes_the_server_down(compiler: Compiler) -> None:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*map(compiler.real.compile, HOSTILE), return_exceptions=True)

    for constraint, outcome in zip(HOSTILE, compiler.run(all_at_once()), strict=True):
        assert isinstance(outcome, bytes | RequestError), constraint
    assert compiler.compile(SMALL)


def test_a_model_without_a_tokenizer_is_refused_at_the_start(tmp_path: Path, loop: asyncio.Runner) -> None:
    compiler = GrammarCompiler(tmp_path, VOCAB, [EOS])
    for start in (compiler.start(), compiler.compile(SMALL)):
        with pytest.raises(ConfigError) as caught:
            loop.run(start)
        assert caught.value.code == "no_tokenizer"
    loop.run(compiler.close())


def test_closing_ends_the_process_and_what_it_was_at(folder: Path, loop: asyncio.Runner) -> None:
    compiler = Compiler(folder, loop)

    async def close_at_work() -> Any:
        await compiler.real.start()
        _, lines, _ = await compiler.real._processes._started()
        work = asyncio.create_task(compiler.real.compile(SLOW))
        while lines[module.QUICK]._settled.is_set():
            await asyncio.sleep(0)
        await compiler.real.close()
        return (await asyncio.gather(work, return_exceptions=True))[0]

    process = compiler.process()
    assert isinstance(compiler.run(close_at_work()), asyncio.CancelledError)
    assert not process.is_running()


def test_the_process_does_not_outlive_a_server_killed_outright(folder: Path) -> None:
    script = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from phalanx.server.grammar.compiler import GrammarCompiler\n"
        "async def main():\n"
        f"    compiler = GrammarCompiler(Path(sys.argv[1]), {VOCAB}, [{EOS}])\n"
        "    await compiler.start()\n"
        "    print((await compiler._processes._started())[0].pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "assert 'torch' not in sys.modules and 'xgrammar' not in sys.modules\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    process = psutil.Process(int(server.stdout.readline()))
    while len(workers := process.children()) < 2:
        time.sleep(0.05)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    for each in (process, *workers):
        each.wait(timeout=60)
