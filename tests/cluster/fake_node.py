"""A Python that plays a node: it answers as its state says, keeps a record of what it was asked, and starts nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cluster.hosts import Cluster, parse_hosts

_SCRIPT = """#!{python} -IS
import json, pathlib, sys
path = pathlib.Path(__file__).with_suffix(".json")
state = json.loads(path.read_text())
action = "start" if "ray.scripts.scripts" in sys.argv else sys.argv[3]
given = sys.stdin.read() if action == "token" else ""
with path.with_suffix(".log").open("a") as log:
    log.write(json.dumps([action, given]) + "\\n")
failure = state["failures"].get(action)
if failure:
    sys.exit(failure)
if action == "start":
    state["probe"]["address"], state["probe"]["processes"] = state["head"], 4
if action == "stop":
    state["probe"]["address"], state["probe"]["processes"] = None, 0
path.write_text(json.dumps(state))
answers = {{"probe": state["probe"], "members": state["members"], "stop": {{"ended": 4}}}}
print(json.dumps(answers.get(action)))
"""
HEAD, WORKER = "10.0.0.1", "10.0.0.2"
ADDRESS = f"{HEAD}:6379"


@dataclass
class FakeNode:
    """Where its Python is, and what it does when asked."""

    python: Path
    state: dict[str, Any] = field(default_factory=dict)

    def tell(self, *, members: tuple[str, ...] = (), failures: dict[str, str] | None = None, **probe: Any) -> None:
        """Change what it answers; `failures` are the last words of actions that fail."""
        if members:
            self.state["members"] = [{"ip": ip, "gpus": 1, "cpus": 2} for ip in members]
        self.state["failures"] |= failures or {}
        self.state["probe"] |= probe
        self.python.with_suffix(".json").write_text(json.dumps(self.state))

    @property
    def asked(self) -> list[str]:
        return [action for action, _ in self._log()]

    @property
    def token(self) -> str:
        return next(given for action, given in self._log() if action == "token")

    def _log(self) -> list[tuple[str, str]]:
        path = self.python.with_suffix(".log")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fake_cluster(folder: Path) -> tuple[Cluster, FakeNode, FakeNode]:
    """Two nodes on this machine that only pretend: the cluster, its head and its worker."""
    nodes = []
    for ip in (HEAD, WORKER):
        python = folder / f"python-{ip.replace('.', '-')}"
        python.write_text(_SCRIPT.format(python=sys.executable))
        python.chmod(0o755)
        nic = {"name": "cx0", "up": True, "speed_mbps": 200_000, "mtu": 9000, "addresses": [ip]}
        probe = {"hostname": "h", "python": "3.12.3", "phalanx": "0.1.0", "ray": "2.60.0", "nic": nic}
        probe |= {"gpus": ["NVIDIA GB10"], "address": None, "processes": 0}
        node = FakeNode(python, {"probe": probe, "head": ADDRESS, "members": [], "failures": {}})
        node.tell()
        nodes.append(node)
    head, worker = nodes
    text = f"""
[cluster]
interface = "cx0"
token_file = "token"
[[node]]
host = "local"
ip = "{HEAD}"
head = true
gpus = 1
python = "{head.python}"
[[node]]
host = "local"
ip = "{WORKER}"
gpus = 1
python = "{worker.python}"
"""
    (folder / "hosts.toml").write_text(text)
    return parse_hosts(text, folder / "hosts.toml"), head, worker
