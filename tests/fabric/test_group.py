"""Groups of ranks: they meet on one address, and a collective whose peer is gone does not hold up its rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

from phalanx.engine.whereabouts import Whereabouts
from phalanx.fabric.group import FabricError, GlooGroup, open_store, poll, serve_store
from phalanx.fabric.host import HostGroup
from phalanx.kernels import cpu
from tests.server.running import eventually

HOST = "127.0.0.1"
WAYS = [
    GlooGroup,
    pytest.param(HostGroup, marks=pytest.mark.skipif(cpu.library() is None, reason="no C compiler")),
]
Pair = tuple[GlooGroup | HostGroup, GlooGroup | HostGroup, "Checked"]


class Checked:
    """Raises from the moment on that it is told to."""

    def __init__(self) -> None:
        self.gone = False
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.gone:
            raise FabricError("a rank is gone")


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Two ranks that met through a store on a port; the first is told when waiting is in vain, and soon."""
    monkeypatch.setattr("phalanx.fabric.group._WAIT_SLICE", timedelta(milliseconds=50))
    monkeypatch.setattr("phalanx.fabric.group._CLOSE_WAIT_S", 0.05)
    first, second, check = request.param(0, 2), request.param(1, 2), Checked()
    store, address = serve_store(HOST)
    with ThreadPoolExecutor(2) as pool:
        meeting = [
            pool.submit(first.connect, store, HOST, check),
            pool.submit(lambda: second.connect(open_store(address, 2), HOST)),
        ]
        for met in meeting:
            met.result(60)
    return first, second, check


def test_ranks_that_met_add_up(pair: Pair) -> None:
    first, second, _ = pair
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(group.all_reduce, torch.ones(3) * (group.rank + 1)) for group in (first, second)]
        assert [done.result(60).tolist() for done in sums] == [[3.0] * 3] * 2
    first.close()
    second.close()


def test_a_slow_peer_is_waited_for(pair: Pair) -> None:
    """For longer than it takes to look after it a few times."""
    first, second, check = pair
    looked = check.calls
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_reduce, torch.ones(1))
        assert eventually(lambda: check.calls > looked + 3)
        second.all_reduce(torch.ones(1))
        assert waiting.result(60).item() == 2.0
    first.close()
    second.close()


def test_a_collective_ends_once_its_peer_is_known_to_be_gone(pair: Pair) -> None:
    """The peer says nothing for ever, as one behind a cut link does; closing does not wait for it either."""
    first, _, check = pair
    check.gone = True
    with pytest.raises(FabricError, match="a rank is gone"):
        first.all_reduce(torch.ones(1))
    first.close()


class Never:
    """A moment that the device never comes to, or fails before."""

    def __init__(self, failed: bool) -> None:
        self.failed = failed

    def query(self) -> bool:
        if self.failed:
            raise RuntimeError("an illegal memory access")
        return False


@pytest.mark.parametrize("failed", [False, True])
def test_waiting_for_a_device_ends_once_a_rank_is_known_to_be_gone(failed: bool) -> None:
    """A device may have failed because a rank is gone: then that is what is told."""
    check = Checked()
    check.gone = True
    with pytest.raises(FabricError, match="a rank is gone"):
        poll(Never(failed), check, Whereabouts())  # type: ignore[arg-type]


def test_a_device_that_failed_of_itself_says_so() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        poll(Never(failed=True), Checked(), Whereabouts())  # type: ignore[arg-type]


def test_a_store_listens_on_its_address_alone() -> None:
    _store, address = serve_store("127.0.0.1")
    port = int(address.rpartition(":")[2])
    listening = [
        each.laddr.ip
        for each in psutil.Process().net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]
