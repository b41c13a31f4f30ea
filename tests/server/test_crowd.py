"""Five thousand connections that do nothing, and one that asks."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
from functools import partial

import psutil
import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from phalanx.server.door import MOST_CONNECTIONS, Door
from phalanx.server.http import BoundedHttp
from phalanx.server.serve import leave_to_stay
from tests.server.test_http import echo

CROWD = 5000
BEGUN = (b"", b"G", b"GET /live HTTP/1.1\r\n\r\n\r\n", b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n")


@pytest.mark.slow
def test_five_thousand_idle_connections_are_bounded_and_an_honest_client_is_served_beside_them() -> None:
    needed, (soft, hard) = CROWD + MOST_CONNECTIONS + 200, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        pytest.skip(f"a process may only open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    door, before, crowd = Door(MOST_CONNECTIONS), psutil.Process().memory_info().rss, []

    async def scene() -> None:
        config = uvicorn.Config(echo, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        loop, make = asyncio.get_running_loop(), partial(BoundedHttp, config, ServerState(), {}, door=door)
        server = await loop.create_server(make, "127.0.0.1", 0, backlog=2048)
        where = server.sockets[0].getsockname()
        for number in range(CROWD):
            idle = socket.socket()
            crowd.append(idle)
            idle.setblocking(False)
            await loop.sock_connect(idle, where)
            await loop.sock_sendall(idle, BEGUN[number % len(BEGUN)])
            if not number % 1000:
                assert await ask(where) == b"/honest 0"
        assert await ask(where) == b"/honest 0"
        assert door._inside.total() <= MOST_CONNECTIONS * 3 // 4
        server.close()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(scene(), 120))
    finally:
        for idle in crowd:
            idle.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process().memory_info().rss - before < 256 * 2**20


async def ask(where: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"GET /honest HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.rpartition(b"\r\n")[2]


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_there_before_the_crowd_is_not_looked_at_when_it_comes() -> None:
    """By the garbage collector, which takes 140 ms for the objects of a server that has just started."""
    try:
        leave_to_stay()
        assert len(gc.get_objects()) < 10_000
    finally:
        gc.unfreeze()
    assert len(gc.get_objects()) > 50_000
