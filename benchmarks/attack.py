"""What an honest client feels while another attacks: its worst stall, its goodput, and the server's memory.

    python benchmarks/attack.py                       # every attack, one after the other, for ten seconds each
    python benchmarks/attack.py --only grammars,places --seconds 20 --json FILE

Starts a server of the default model on loopback with two keys. One client is honest: it asks `/live` twenty times a
second and streams one answer after the other. A process of its own attacks with the other key, or with none. Figures
are set against undisturbed times of the same server: a stall is the longest time `/live` took, or between
two events of the stream. Memory is that of the API process and of those that read requests and grammars for it.
Quiet and attacked times take turns, so that what else the machine does hits both; stalls are the worst of all turns.

All share the machine's cores, so the attacker is made to cost little: its bytes are made beforehand, and it stands back
behind the others (nice 19), as one on another machine would. As that would, it comes from an address of its own
(127.0.0.2; `--from 127.0.0.1` for that of the honest client). The columns `cpu` say how many cores each of them took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil

HONEST, GREEDY = "honest-key", "greedy-key"
LARGEST = 4 * 2**20 - 100
ANSWER = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
ROLES = ("attacker", "api", "readers", "engine", "client")
GOAL_STALL_MS, GOAL_MEMORY, GOAL_GOODPUT = 250, 2.0, 0.5


def request(path: str, body: bytes, key: str = GREEDY) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class Attacker:
    """Raw connections to the server, until its time is over."""

    def __init__(self, host: str, port: int, address: str) -> None:
        self._where: dict[str, Any] = {"host": host, "port": port, "local_addr": (address, 0)}
        self.held: list[asyncio.StreamWriter] = []

    async def send(self, data: bytes, wait: bool = True) -> None:
        """Over a connection of its own; not to wait for an answer is to leave at once."""
        reader, writer = await asyncio.open_connection(**self._where)
        try:
            writer.write(data)
            await writer.drain()
            if wait:
                await asyncio.wait_for(reader.read(100), 120)
        finally:
            writer.close()

    async def hold(self, data: bytes) -> None:
        _, writer = await asyncio.open_connection(**self._where)
        writer.write(data)
        self.held.append(writer)

    async def again(self, work: Callable[[], Awaitable[None]], beside: int = 1, pause_s: float = 0.0) -> None:
        async def one() -> None:
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    await work()
                await asyncio.sleep(pause_s)

        await asyncio.gather(*(one() for _ in range(beside)))


async def tokenize(attacker: Attacker) -> None:
    """Eight at once, of 4 MiB each, all of it one-letter words."""
    body = b'{"prompt": "' + b"1 " * (LARGEST // 2) + b'"}'
    await attacker.again(lambda: attacker.send(request("/tokenize", body)), beside=8)


async def long_prompts(attacker: Attacker) -> None:
    """As long as could fit by their characters, and far too long by their tokens."""
    body = b'{"prompt": "' + b"1 " * 300_000 + b'"}'
    await attacker.again(lambda: attacker.send(request("/v1/completions", body)), beside=8)


async def wrong_items(attacker: Attacker) -> None:
    """Bodies of which every item is wrong."""
    bodies = [
        request("/detokenize", b'{"tokens": [' + b'"",' * (LARGEST // 3 - 10) + b'""]}'),
        request("/v1/completions", b'{"prompt": [[' + b'"",' * (LARGEST // 3 - 10) + b'""]]}'),
        request("/v1/completions", b'{"prompt": "a", "logit_bias": {' + _biases() + b"}}"),
    ]
    await asyncio.gather(*(attacker.again(lambda body=body: attacker.send(body)) for body in bodies))  # type: ignore[misc]


def _biases() -> bytes:
    return b",".join(b'"%d":"x"' % token for token in range(300_000))


async def held_connections(attacker: Attacker) -> None:
    """No key: a line end after an answer, a body that never comes, half a head; as many as can be opened."""
    begun = (b"GET /live HTTP/1.1\r\n\r\n\r\n", b"GET /live HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"GET /l", b"")
    for number in range(5000):
        with contextlib.suppress(OSError):
            await attacker.hold(begun[number % len(begun)])
    await asyncio.sleep(3600)


async def nonsense(attacker: Attacker) -> None:
    """No key: pipelines that end in what is no HTTP, and wrong keys."""
    await asyncio.gather(
        attacker.again(lambda: attacker.send(b"GET / HTTP/1.1\r\n\r\n" * 2 + b"\x00"), beside=4),
        attacker.again(lambda: attacker.send(request("/v1/completions", b"{}", "wrong")), beside=4),
    )


async def grammars(attacker: Attacker) -> None:
    """Regexes that take their time, sent and left; and many choices with one."""
    numbers = iter(range(10**9))

    def body() -> bytes:
        regex = f"((a{{1,{40 + next(numbers) % 900}}}){{1,99}}){{1,99}}{next(numbers)}"
        return json.dumps({"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": regex}}).encode()

    await attacker.again(lambda: attacker.send(request("/v1/completions", body()), wait=False), beside=8, pause_s=0.05)


async def places(attacker: Attacker) -> None:
    """Requests with many choices, more in all than there are places, each as long as it gets."""
    body = json.dumps({"prompt": "a", "n": 16, "max_tokens": 4000, "ignore_eos": True}).encode()
    await attacker.again(lambda: attacker.send(request("/v1/completions", body)), beside=16, pause_s=0.2)


async def no_readers(attacker: Attacker) -> None:
    """Streams that nobody reads."""
    body = json.dumps(ANSWER | {"max_tokens": 2000, "logprobs": 20}).encode()
    for _ in range(32):
        await attacker.hold(request("/v1/completions", body))
    await asyncio.sleep(3600)


ATTACKS = {
    attack.__name__: attack
    for attack in (tokenize, long_prompts, wrong_items, held_connections, nonsense, grammars, places, no_readers)
}


@dataclass
class Felt:
    """By an honest client. Memory is the highest over that before the attack."""

    live_ms: float
    gap_ms: float
    tokens_per_s: float
    memory_mb: float
    cores: dict[str, float] = field(default_factory=dict)

    @property
    def stall_ms(self) -> float:
        return max(self.live_ms, self.gap_ms)

    @classmethod
    def of(cls, turns: list[Felt]) -> Felt:
        """The worst stalls and memory of all turns, the mean of what goes on all the time."""
        return cls(
            max(turn.live_ms for turn in turns),
            max(turn.gap_ms for turn in turns),
            sum(turn.tokens_per_s for turn in turns) / len(turns),
            max(turn.memory_mb for turn in turns),
            {role: sum(turn.cores.get(role, 0.0) for turn in turns) / len(turns) for role in ROLES},
        )


async def feel(url: str, seconds: float, pid: int, attacker: int | None = None) -> Felt:
    felt = Felt(0.0, 0.0, 0.0, memory_of(pid))
    before, over = cpu_of(pid, attacker), time.monotonic() + seconds
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {HONEST}"}
    async with httpx.AsyncClient(base_url=url, timeout=300, headers=headers, limits=limits) as client:
        streaming = asyncio.create_task(_stream(client, felt))
        await asyncio.gather(_ask_live(client, over, felt), _weigh(over, felt, pid))
        streaming.cancel()
        await asyncio.wait([streaming])
    felt.tokens_per_s /= seconds
    felt.cores = {role: spent / seconds for role, spent in (cpu_of(pid, attacker) - before).items()}
    return felt


async def _ask_live(client: httpx.AsyncClient, over: float, felt: Felt) -> None:
    while time.monotonic() < over:
        started = time.monotonic()
        await client.get("/live")
        felt.live_ms = max(felt.live_ms, (time.monotonic() - started) * 1e3)
        await asyncio.sleep(0.05)


async def _stream(client: httpx.AsyncClient, felt: Felt) -> None:
    """Until cancelled. The time to the first token counts as a gap, and what is waited for at the end."""
    last = time.monotonic()

    def end_gap() -> float:
        now = time.monotonic()
        felt.gap_ms = max(felt.gap_ms, (now - last) * 1e3)
        return now

    try:
        while True:
            last = time.monotonic()
            async with client.stream("POST", "/v1/completions", json=ANSWER) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        last = end_gap()
                        felt.tokens_per_s += 1
                if answer.status_code != 200:
                    await asyncio.sleep(0.05)
    finally:
        end_gap()


async def _weigh(over: float, felt: Felt, pid: int) -> None:
    while time.monotonic() < over:
        felt.memory_mb = max(felt.memory_mb, await asyncio.to_thread(memory_of, pid))
        await asyncio.sleep(0.2)


def processes_of(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """The server's, each with what it does: `api`, `engine`, or `readers` of requests and grammars."""
    api = psutil.Process(pid)
    yield "api", api
    for process in api.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_engine = any(part.endswith(("engine_process", "runtime.worker")) for part in process.cmdline())
            yield "engine" if is_engine else "readers", process


def memory_of(pid: int) -> float:
    """Of the API process and what it started, but for the engine: proportional, since forked processes share."""
    total = 0
    for role, process in processes_of(pid):
        with contextlib.suppress(psutil.Error):
            if role != "engine":
                total += process.memory_full_info().pss
    return total / 1e6


def cpu_of(pid: int, attacker: int | None) -> Counter[str]:
    """Seconds so far, by what was done with them. Readers come and go: those gone are counted by who forked them."""
    seconds: Counter[str] = Counter()
    others = [("client", psutil.Process())] + ([("attacker", psutil.Process(attacker))] if attacker else [])
    for role, process in (*processes_of(pid), *others):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds[role] += times.user + times.system
            if role == "readers":
                seconds[role] += times.children_user + times.children_system
    return seconds


@contextlib.contextmanager
def server(folder: Path, options: list[str]) -> Iterator[tuple[str, int]]:
    (folder / "keys").write_text(f"{HONEST}\n{GREEDY}\n")
    command = [sys.executable, "-m", "phalanx.cli", "serve", "--port", "0", "--api-key-file", str(folder / "keys")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"at (\S+)/v1 ", process.stdout.readline())
        assert found is not None, (folder / "log").read_text()
        yield found.group(1), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def measure(name: str, url: str, pid: int, seconds: float, turns: int, address: str) -> dict[str, Any]:
    quiet, attacked = [], []
    for _ in range(turns):
        quiet.append(asyncio.run(feel(url, seconds / turns, pid)))
        command = [sys.executable, __file__, "--attack", name, "--url", url, "--from", address]
        attack = subprocess.Popen(command)
        try:
            time.sleep(1)
            attacked.append(asyncio.run(feel(url, seconds / turns, pid, attack.pid)))
        finally:
            attack.kill()
            attack.wait()
        time.sleep(1)
    before, under = Felt.of(quiet), Felt.of(attacked)
    result = {
        "attack": name,
        "undisturbed": asdict(before),
        "under_attack": asdict(under),
        "stall_ms": under.stall_ms,
        "memory": under.memory_mb / before.memory_mb,
        "goodput": under.tokens_per_s / max(before.tokens_per_s, 1e-9),
    }
    print(
        f"{name:17} {before.stall_ms:8.0f} {under.live_ms:8.0f} {under.gap_ms:8.0f} {before.memory_mb:8.0f} "
        f"{result['memory']:7.2f} {result['goodput']:8.0%}   "
        + " ".join(f"{under.cores.get(role, 0.0):8.2f}" for role in ROLES),
        flush=True,
    )
    return result


def attack(name: str, url: str, address: str) -> None:
    os.nice(19)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    host, port = url.removeprefix("http://").split(":")
    asyncio.run(ATTACKS[name](Attacker(host, int(port), address)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ATTACKS), help="names of attacks, with commas")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=3, help="quiet and attacked, of the seconds each has")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", dest="address", default="127.0.0.2", help="where the attacker comes from")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack(arguments.attack, arguments.url, arguments.address)
        return
    print("attack             stall ms   /live   stream  idle MB  memory  goodput   cpu: " + " ".join(ROLES))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only.split(","):
            with server(Path(folder), ["--max-num-batched-tokens", "256"]) as (url, pid):
                results.append(measure(name, url, pid, arguments.seconds, arguments.turns, arguments.address))
    goal = f"stalls up to {GOAL_STALL_MS} ms, memory up to {GOAL_MEMORY:g} times idle, goodput from {GOAL_GOODPUT:.0%}"
    kept = [
        each["attack"]
        for each in results
        if each["stall_ms"] <= GOAL_STALL_MS and each["memory"] <= GOAL_MEMORY and each["goodput"] >= GOAL_GOODPUT
    ]
    print(f"{len(kept)} of {len(results)} keep the goal ({goal}): {', '.join(kept) or 'none'}")
    if arguments.json is not None:
        told = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load": os.getloadavg(), "results": results}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
