"""RayWorkers: the other ranks on the machines of a Ray cluster.

Ray only finds the machines and starts a process on each. Plans, reports and signs of life go over encrypted sockets of
our own, tensors over the fabric, all on the address of one interface.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import msgspec
import zmq
from torch._C._distributed_c10d import Store

from phalanx.engine.step_plan import Beat
from phalanx.errors import ConfigError
from phalanx.fabric.group import FabricError, serve_store
from phalanx.runtime import environment
from phalanx.runtime.channel import Beacon, Context, Gate, Keys
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.links import Links
from phalanx.runtime.messages import Meeting, RankAssignment, RankReport
from phalanx.runtime.placement import RayNode, Wanted
from phalanx.runtime.rank import Spot, on_gpus
from phalanx.runtime.ray_cluster import RayCluster
from phalanx.runtime.seat import Ended, Posting, Seat, SeatFacts, gather_facts
from phalanx.runtime.watch import SERVING_PATIENCE_S, Watch
from phalanx.runtime.workers import Cause, seen_of

_CAUSE_WAIT_S = SERVING_PATIENCE_S + 1.0
_MISSED_BEATS_S = 2.0


class RayWorkers:
    """Ranks 1, 2, ... as processes that Ray starts, one a bundle of a placement group."""

    pages = None

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self.config = msgspec.structs.replace(config, device="cuda" if on_gpus(config) else "cpu")
        cluster = RayCluster(config.ray_address, config.node_wait_s)
        closing: list[RayCluster | Watch | Gate | Context] = [cluster]
        self._finalizer = weakref.finalize(self, _clean_up, closing)
        try:
            self._take_places(cluster, model_path.absolute())
            self._open_channels(closing)
            self._start_ranks(str(model_path.absolute()))
        except BaseException:
            self.close()
            raise

    def _take_places(self, cluster: RayCluster, model_path: Path) -> None:
        """Reserve, look at every machine, and refuse what cannot work before anything loads."""
        wanted = Wanted(self.config.tp, self.config.device == "cuda", self.config.ranks_per_node)
        self._places = cluster.reserve(wanted)
        self._seats = cluster.seat(wanted, Seat)
        interface = self.config.interface
        asked = [
            seat.facts.remote(str(model_path), interface, node.address)
            for seat, node in zip(self._seats, self._places, strict=True)
        ]
        answers = cluster.ask(asked, self._places)
        self._facts = [msgspec.json.decode(answer, type=SeatFacts) for answer in answers]
        here = gather_facts(str(model_path), interface, self._places[0].address)
        self.hosts = check_machines(here, self._facts, self._places, interface, self.config.load_format)
        self.host = self.hosts[0]
        self.nodes = [f"{node.hostname} ({host})" for node, host in zip(self._places, self.hosts, strict=True)]
        self._ranks_on = Counter(node.id for node in self._places)
        gpu = visible_index(self._facts[0].gpus) if self.config.device == "cuda" else 0
        self.spot = Spot(gpu, self._ranks_on[self._places[0].id])

    def _open_channels(self, closing: list[RayCluster | Watch | Gate | Context]) -> None:
        context: Context = zmq.Context()
        self._token, self._keys = secrets.token_hex(16), Keys.make()
        rank_keys = {rank: facts.public_key for rank, facts in enumerate(self._facts) if rank}
        closing += [context, Gate(context, rank_keys.values())]
        free_port = f"tcp://{self.host}:*"
        self.links = Links(context, free_port, free_port, self._token, self._keys, rank_keys)
        self._beacon = Beacon(context, free_port, self._token, self._keys)
        self._watch = Watch(self.links, self._beacon, rank_keys)
        closing.append(self._watch)

    def _start_ranks(self, model_path: str) -> None:
        self._store, store_address = serve_store(self.host)
        variables = environment.sent(os.environ)
        self._running: dict[int, Future[bytes]] = {}
        for rank, (seat, node, host) in enumerate(zip(self._seats, self._places, self.hosts, strict=True)):
            if rank == 0:
                continue
            meeting = Meeting(
                orders=f"tcp://{host}:*",
                reports=self.links.reports.address,
                beats=self.links.beats.address,
                store=store_address,
                host=host,
                beacon=self._beacon.address,
            )
            assignment = RankAssignment(
                config=self.config,
                model_path=model_path,
                rank=rank,
                spot=Spot(0, self._ranks_on[node.id]),
                meeting=meeting,
                token=self._token,
                engine_key=self._keys.public,
            )
            posting = msgspec.json.encode(Posting(assignment, variables))
            self._running[rank] = seat.run.remote(posting).future()

    def store(self) -> Store:
        return self._store

    def send(self, frames: list[bytes]) -> None:
        self.links.send(frames)

    def receive(self, timeout_ms: int) -> RankReport | None:
        report = self.links.receive(timeout_ms)
        if report is None:
            self.check()
        return report

    def check(self) -> None:
        if self._watch.lost or any(running.done() for running in self._running.values()):
            raise FabricError("a rank is gone")

    def beats(self) -> list[Beat]:
        return self._watch.beats()

    def started(self) -> None:
        self._watch.patience_s = SERVING_PATIENCE_S

    def cause_of_death(self) -> Cause | None:
        """Who lost a peer ends too, and says so: the cause is who ended of itself, or fell silent without a word."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while True:
            ended = {rank: _ended(running) for rank, running in self._running.items()}
            for rank, end in ended.items():
                if end is not None and (end.failure is None or not end.failure.echo):
                    return Cause(rank, end.failure, seen_of(end.status))
            gone = [rank for rank, end in ended.items() if end is None and self._is_gone(rank)]
            if gone:
                return self._lost(gone[0])
            if time.monotonic() > deadline:
                return next((Cause(rank, end.failure, "") for rank, end in ended.items() if end is not None), None)
            time.sleep(0.05)

    def _is_gone(self, rank: int) -> bool:
        """Silent for too long, or for a while and Ray says that its process is gone."""
        return rank in self._watch.lost or (
            self._running[rank].done() and self._watch.silence_s(rank) > _MISSED_BEATS_S
        )

    def _lost(self, rank: int) -> Cause:
        return Cause(
            rank,
            None,
            f"gave no sign of life for {self._watch.silence_s(rank):.0f} s.",
            "node_lost",
            "The machine, its Ray node or the link to it is gone: look there. "
            "With --restart the engine comes back when the machine does.",
        )

    def close(self) -> None:
        self._finalizer()


def _ended(running: Future[bytes]) -> Ended | None:
    """None as well where Ray itself cannot tell: the machine has gone with the rank."""
    if not running.done() or running.exception() is not None:
        return None
    return msgspec.json.decode(running.result(), type=Ended)


def _clean_up(closing: list[RayCluster | Watch | Gate | Context]) -> None:
    """The last opened first, and the cluster, whose end ends the ranks, last."""
    for each in reversed(closing):
        if isinstance(each, zmq.Context):
            each.destroy(linger=0)
        else:
            each.close()
    closing.clear()


def check_machines(
    here: SeatFacts, facts: list[SeatFacts], nodes: list[RayNode], interface: str | None, load_format: str
) -> list[str]:
    """The address of every rank, once all machines have the same software, the interface and the model."""
    addresses = []
    for found, node in zip(facts, nodes, strict=True):
        for package, wanted in here.versions.items():
            if found.versions.get(package) != wanted:
                raise ConfigError(
                    "versions_differ",
                    f"{node.name} has {package} {found.versions.get(package)}, this machine has {wanted}.",
                    "Install the same versions on every node.",
                )
        if found.address is None:
            raise ConfigError(
                "no_interface",
                f"{node.name} has no interface {interface} with an IPv4 address; it has {', '.join(found.interfaces)}.",
                "Name one that every node has, or leave --interface out to use Ray's.",
            )
        _check_model(here, found, node, load_format)
        addresses.append(found.address)
    return addresses


def _check_model(here: SeatFacts, found: SeatFacts, node: RayNode, load_format: str) -> None:
    needed = {"config.json"} & set(here.files) if load_format == "dummy" else set(here.files)
    missing = sorted(name for name in needed if name not in found.files)
    other = sorted(name for name in needed if name in found.files and found.files[name] != here.files[name])
    if missing or other:
        wrong = f"lacks {', '.join(missing[:3])}" if missing else f"has another {other[0]}"
        more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
        raise ConfigError(
            "model_missing",
            f"{node.name} {wrong}{more} where this machine has the model.",
            "Copy the model to the same path on every node.",
        )


def visible_index(given: str) -> int:
    """Which of the GPUs that this process sees is the one that Ray gave to rank 0."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return int(given) if given.isdigit() else 0
    names = seen.split(",")
    if given not in names:
        raise ConfigError(
            "wrong_gpus",
            f"Ray gave GPU {given} to rank 0, but CUDA_VISIBLE_DEVICES is {seen} here.",
            "Start the server with the CUDA_VISIBLE_DEVICES of its Ray node, or without.",
        )
    return names.index(given)
