"""The files of a recipe: shell, docker compose, systemd, Kubernetes, and Ray over several DGX Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.plan.recipes import boxes, spark
from phalanx.plan.recipes.fabric import fabric_environment
from phalanx.plan.recipes.kubernetes import kubernetes_files
from phalanx.plan.recipes.launch import ADMIN_PORT, FIRST_PORT, TRTLLM_OPTIONS, Launch, command, trtllm_options
from phalanx.plan.recipes.systemd import unit_files
from phalanx.plan.recipes.words import title, wrapped

Files = dict[str, str]
_BESIDE = ("Containerfile", "grafana.json")
_AT_HOME = '"${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"'
_MODELS = {"phalanx": "models:/models"}
"""Where an engine's container keeps models, if not at home: a volume is its own user's."""


def recipe(launch: Launch, kind: str) -> Files:
    """File names and their text. The shell script alone needs nothing but the engine."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.3)
        suggestion = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError("unknown_recipe", f"No recipe is called {kind!r}.", f"{suggestion}Known: {', '.join(KINDS)}.")
    if launch.spans_machines and kind not in (("ray",) if launch.one_gpu_machines else ("ray", "k8s")):
        raise ConfigError(
            "needs_ray",
            f"A replica on {launch.machine.name} spans {launch.nodes} machines.",
            "Use --recipe ray with --engine vllm, phalanx cluster recipe for Phalanx on DGX Spark, or a lower --tp.",
        )
    files = KINDS[kind](launch)
    if launch.engine.name == "trtllm" and kind != "k8s":
        files[TRTLLM_OPTIONS] = trtllm_options(launch)
    if launch.engine.name == "phalanx":
        files |= {name: _shipped(name) for name in (_BESIDE if kind in ("compose", "k8s") else _BESIDE[1:])}
    return files


def _shipped(name: str) -> str:
    return (resources.files("phalanx.plan.recipes") / "deploy" / name).read_text(encoding="utf-8")


def _shell(launch: Launch) -> Files:
    lines = [
        "#!/usr/bin/env bash",
        f"# {title(launch)}",
        "set -euo pipefail",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
        "",
    ]
    for replica in range(launch.replicas):
        devices, words = ",".join(launch.devices(replica)), command(launch, port=FIRST_PORT + replica)
        lines.append(f"{launch.visible}={devices} {wrapped(words)} &")
    return {"serve.sh": "\n".join([*lines, "wait -n", ""])}


def _compose(launch: Launch) -> Files:
    lines = [f"# {title(launch)}", "services:"]
    for replica in range(launch.replicas):
        words = command(launch, host="0.0.0.0")
        lines += [f"  replica-{replica}:", f"    image: {launch.image}"]
        if launch.engine.name == "phalanx":
            words = command(launch, host="0.0.0.0", extra=("--admin-port", str(ADMIN_PORT)))
            lines.append("    build: {context: ., dockerfile: Containerfile}")
        lines += [
            "    entrypoint: []",
            f"    command: {json.dumps(words)}",
            "    ipc: host",
            "    restart: unless-stopped",
            *_compose_network(launch, FIRST_PORT + replica),
            f"    environment: {_compose_environment(launch, launch.devices(replica))}",
            "    volumes:",
            f"      - {_MODELS.get(launch.engine.name, _AT_HOME)}",
        ]
        if launch.engine.name == "trtllm":
            lines += [f"      - ./{TRTLLM_OPTIONS}:/app/{TRTLLM_OPTIONS}:ro", "    working_dir: /app"]
        lines += _compose_devices(launch, launch.devices(replica))
    if launch.engine.name in _MODELS:
        lines.append("volumes: {models: {}}")
    return {"compose.yaml": "\n".join([*lines, ""])}


def _compose_network(launch: Launch, port: int) -> list[str]:
    """A DGX Spark's container sees its RDMA devices and its host's network, and may pin memory for them."""
    if launch.one_gpu_machines:
        return ["    network_mode: host", "    devices: [/dev/infiniband]", "    ulimits: {memlock: -1}"]
    return [f'    ports: ["127.0.0.1:{port}:{FIRST_PORT}"]']


def _compose_environment(launch: Launch, devices: list[str]) -> str:
    if launch.vendor == "NVIDIA":
        return "[HF_TOKEN]"
    return json.dumps(["HF_TOKEN", f"{launch.visible}={','.join(devices)}"])


def _compose_devices(launch: Launch, devices: list[str]) -> list[str]:
    """How a container reaches its cards: each vendor has its own way."""
    if launch.vendor == "AMD":
        return ["    devices: [/dev/kfd, /dev/dri]", "    group_add: [video]", "    cap_add: [SYS_PTRACE]"]
    if launch.vendor == "Intel":
        return ["    runtime: habana", "    cap_add: [SYS_NICE]"]
    return [
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        "            - driver: nvidia",
        f"              device_ids: {json.dumps(devices)}",
        "              capabilities: [gpu]",
    ]


def _ray(launch: Launch) -> Files:
    """One rank a machine over RoCE: the network, the limits, the cluster, and the server on its first machine."""
    if launch.spans_machines and not launch.one_gpu_machines:
        return boxes.ray_files(launch)
    if not launch.one_gpu_machines:
        raise ConfigError(
            "no_ray_recipe",
            f"{launch.machine.name} needs no Ray: every replica is in one box.",
            "Use --recipe shell, compose, systemd or k8s.",
        )
    if launch.engine.name != "vllm":
        raise ConfigError(
            "no_ray_recipe",
            f"This recipe is not for {launch.engine.title}.",
            "Use --engine vllm; for Phalanx there is phalanx cluster recipe; on one machine, another recipe will do.",
        )
    nodes = launch.nodes * launch.replicas
    files = {f"node-{node}/{spark.NETPLAN}": spark.netplan(node) for node in range(nodes)} | spark.system_files()
    for replica in range(launch.replicas):
        files[f"replica-{replica}.sh"] = _ray_script(launch, replica * launch.nodes)
    return files


def _ray_script(launch: Launch, head: int) -> str:
    address, interface = spark.address(head), spark.INTERFACES[0]
    serve = wrapped(command(launch, host="0.0.0.0", extra=("--distributed-executor-backend", "ray")))
    workers = ", ".join(spark.address(head + rank) for rank in range(1, launch.nodes)) or "none"
    fabric = "\n".join(f"export {name}={value}" for name, value in fabric_environment(interface, spark.RDMA).items())
    return f"""#!/usr/bin/env bash
# {title(launch)}
# Run on every machine of this replica: first on {address}, which serves, then on its workers ({workers}).
# Before: ray get-auth-token --generate on the first, and the same ~/.ray/auth_token (mode 600) on all.
set -euo pipefail
ulimit -l unlimited
# The GPU's memory is the system's: what the page cache holds, the engine cannot take.
sync && echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null
SELF=$(ip -4 -o addr show {interface} | grep -oP '(?<=inet )[0-9.]+')
export VLLM_HOST_IP=$SELF
{fabric}
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0

if [ "$SELF" != {address} ]; then
  exec ray start --block --address={address}:6379 --node-ip-address="$SELF" --num-gpus=1
fi
ray start --head --port=6379 --node-ip-address="$SELF" --num-gpus=1 --include-dashboard=false
until [ "$(ray status | grep -c ' node_')" -ge {launch.nodes} ]; do sleep 2; done
exec {serve}
"""


def write_files(files: Files, folder: Path) -> None:
    """Scripts can be run, and netplan's files are read by nobody else, as it demands."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.name == spark.NETPLAN:
            path.chmod(0o600)
        elif path.suffix == ".sh":
            path.chmod(0o755)


KINDS: dict[str, Callable[[Launch], Files]] = {
    "shell": _shell,
    "compose": _compose,
    "systemd": unit_files,
    "k8s": kubernetes_files,
    "ray": _ray,
}
