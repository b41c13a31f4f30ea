"""RayCluster: joins a running Ray cluster, and reserves a place for every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.runtime.placement import RayNode, Wanted, bundle_of_each_rank, bundles, check_room, too_small
from phalanx.version import install_command

_LOOK_EVERY_S = 0.5
_CLOSE_WAIT_S = 2.0
_START_WAIT_S = 120.0
_REACH_WAIT_S = 5.0


class RayCluster:
    """Ray as a driver sees it. Whatever it takes from Ray ends with this process at the latest."""

    def __init__(self, address: str | None, wait_s: float) -> None:
        self._ray = _import_ray()
        self._deadline = time.monotonic() + wait_s
        self._joined = not self._ray.is_initialized()
        self._group: Any = None
        self._seats: list[Any] = []
        if self._joined:
            self._join(address or os.environ.get("RAY_ADDRESS") or "auto")
        self.driver: str = self._ray.get_runtime_context().get_node_id()

    def _join(self, address: str) -> None:
        _check_access(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._wait(lambda: _check_reach(address))
        try:
            with _signals_kept():
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            self._ray.shutdown()
            raise _why_not(error, address) from None

    def nodes(self) -> list[RayNode]:
        """Those that Ray holds to be alive."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [_node(entry, free.get(entry["NodeID"], {})) for entry in self._ray.nodes() if entry["Alive"]]

    def reserve(self, wanted: Wanted) -> list[RayNode]:
        """A bundle for each rank; returns the node of each. Waits for nodes that are missing or not free yet."""
        from ray.util.placement_group import placement_group, placement_group_table

        self._wait(lambda: check_room(wanted, self.nodes(), self.driver))
        nodes = self.nodes()
        self._group = placement_group(bundles(wanted, nodes, self.driver), strategy="PACK")
        if not self._group.wait(max(self._deadline - time.monotonic(), _LOOK_EVERY_S)):
            raise too_small(wanted, self.nodes())
        by_id = {node.id: node for node in self.nodes()}
        node_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        self._bundles = bundle_of_each_rank(node_of_bundle, list(by_id.values()), self.driver)
        return [by_id[node_of_bundle[bundle]] for bundle in self._bundles]

    def _wait(self, check: Callable[[], None]) -> None:
        """Until the check passes; its error if it does not in time."""
        while True:
            try:
                return check()
            except ConfigError:
                if time.monotonic() > self._deadline:
                    raise
            time.sleep(_LOOK_EVERY_S)

    def seat(self, wanted: Wanted, actor: type) -> list[Any]:
        """An actor of this class for each rank, on its node, holding its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        held = {"num_gpus": 1, "num_cpus": 0} if wanted.on_gpus else {"num_cpus": 1}
        for bundle in self._bundles:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            made = self._ray.remote(actor).options(scheduling_strategy=strategy, max_restarts=0, **held)
            self._seats.append(made.remote())
        return self._seats

    def ask(self, refs: list[Any], nodes: list[RayNode]) -> list[bytes]:
        """The answers of all seats. A seat that cannot be had is told with its node."""
        answers = []
        deadline = time.monotonic() + _START_WAIT_S
        for ref, node in zip(refs, nodes, strict=True):
            try:
                answers.append(self._ray.get(ref, timeout=max(deadline - time.monotonic(), 1)))
            except self._ray.exceptions.GetTimeoutError:
                found = f"{node.name} started no process in {_START_WAIT_S:.0f} s."
                raise ConfigError("node_silent", found, "Look at the node, and at the link to it.") from None
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise ConfigError(
                    "node_unfit",
                    f"{node.name} cannot run a rank: {reason}",
                    f"Install the same Phalanx on every node: {install_command('cluster')}.",
                ) from None
        return answers

    def close(self) -> None:
        """Give back what was reserved. Does not wait for a cluster that does not answer."""
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(_CLOSE_WAIT_S)

    def _leave(self) -> None:
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):
            for seat in self._seats:
                self._ray.kill(seat)
            if self._group is not None:
                remove_placement_group(self._group)
        if self._joined:
            self._ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(
            "no_ray", "The executor is ray, but Ray is not installed.", f"Run: {install_command('cluster')}"
        ) from None
    return ray


def _check_access(address: str) -> None:
    """Without a token, whoever reaches a Ray cluster can run code on all its machines."""
    if address.startswith("ray://"):
        raise ConfigError(
            "bad_option",
            f"The Ray address is {address}.",
            "Give HOST:PORT: the engine is itself a part of the cluster.",
        )
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ConfigError("ray_open", f"RAY_AUTH_MODE is {mode}.", "Use token, on every node.")
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not os.environ.get("RAY_AUTH_TOKEN") and not file.exists():
        raise ConfigError(
            "no_ray_token",
            f"There is no token to join the Ray cluster with: RAY_AUTH_TOKEN is not set and there is no file {file}.",
            "Use the token the cluster was started with; `ray get-auth-token --generate` makes one.",
        )


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_reach(address: str) -> None:
    """Ray itself takes more than a minute to say that nobody listens there."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_WAIT_S):
            return
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> ConfigError:
    where = "on this machine" if address == "auto" else f"at {address}"
    return ConfigError(
        "no_cluster",
        f"No Ray cluster was found {where}: {reason}.",
        "Start one on this machine (`phalanx cluster up`, or `ray start`), or name it with --ray-address.",
    )


def _why_not(error: Exception, address: str) -> ConfigError:
    reason = " ".join(str(error).split()).rstrip(".")
    if "ersion mismatch" in reason:
        return ConfigError("versions_differ", f"{reason}.", "Install the same versions on every node.")
    if address == "auto":
        return _no_cluster(address, reason)
    return ConfigError(
        "cluster_refused",
        f"The Ray cluster at {address} does not let this machine in: {reason}.",
        "It must be a node of that cluster, and its RAY_AUTH_TOKEN the cluster's.",
    )


def _node(entry: dict[str, Any], free: dict[str, float]) -> RayNode:
    has = entry["Resources"]
    return RayNode(
        id=entry["NodeID"],
        address=entry["NodeManagerAddress"],
        hostname=entry["NodeManagerHostname"],
        gpus=int(has.get("GPU", 0)),
        cpus=int(has.get("CPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
        free_cpus=int(free.get("CPU", 0)),
    )
