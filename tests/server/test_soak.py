"""Many requests, many of them given up: none is lost, and memory does not grow."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.running import Server, eventually, running
from tests.server.test_faults import books_balance

pytestmark = pytest.mark.slow

WARM_UP, MOST_ROUNDS, REQUESTS, CONCURRENCY = 150, 4, 150, 64
MOST_GROWTH = 2 * 2**20
"""In the round in which a process grew least: a leak is in all of them, what is met for the first time only in one."""


async def one(client: httpx.AsyncClient, rng: random.Random) -> str:
    """A request of random kind, a third of them left before their end. Says how it went."""
    body = {
        "prompt": [rng.randrange(500) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 20),
        "n": rng.choice([1, 1, 1, 2, 4]),
        "stream": rng.random() < 0.5,
        "temperature": rng.choice([0.0, 1.0]),
    }
    patience = rng.uniform(0, 0.1) if rng.random() < 0.33 else None
    try:
        async with asyncio.timeout(patience):
            answer = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "cancelled"
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == len(body["prompt"])
        assert usage["completion_tokens"] == body["n"] * body["max_tokens"]
    return "answered"


async def run(url: str, count: int, seed: int) -> list[str]:
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        waiting, rng, ends = asyncio.Semaphore(CONCURRENCY), random.Random(seed), []

        async def bounded(index: int) -> None:
            async with waiting:
                ends.append(await one(client, random.Random(rng.random() + index)))

        await asyncio.gather(*(bounded(index) for index in range(count)))
        return ends


def memory(server: Server) -> dict[str, int]:
    return {
        "api": psutil.Process(server.process.pid).memory_info().rss,
        "engine": server.engine().memory_info().rss,
    }


def test_hundreds_of_requests_with_random_cancels(tiny_chat: Path, tmp_path: Path) -> None:
    """Some round takes no more memory; the first ones may: the matrix library keeps code for every shape it meets, and
    steps are short, so that there are few.
    """
    small = ("--max-num-seqs", "12", "--kv-cache-memory", str(4 * 2**20), "--max-num-batched-tokens", "16")
    with running(tiny_chat, tmp_path, *small, "--max-queued-requests", "1000") as server:
        asyncio.run(run(server.url, WARM_UP, seed=0))
        sizes, growing = [memory(server)], {"api", "engine"}
        while growing and len(sizes) <= MOST_ROUNDS:
            ends = asyncio.run(run(server.url, REQUESTS, seed=len(sizes)))
            assert len(ends) == REQUESTS
            assert set(ends) == {"answered", "cancelled"}
            assert eventually(lambda: books_balance(server))
            sizes.append(memory(server))
            growing = {name for name in growing if sizes[-1][name] - sizes[-2][name] >= MOST_GROWTH}
        assert not growing, sizes
        assert server.stop() == 0
