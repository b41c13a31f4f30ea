"""The files of a recipe: shell, docker compose, systemd, Kubernetes, and Ray over several machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.plan.recipes import boxes, parts, spark
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
    if launch.prompt_replicas:
        return parts.scripts(launch, kind)
    if launch.spans_machines:
        boxes.check(launch, kind)
    files = KINDS[kind](launch)
    if launch.engine.name == "trtllm" and kind != "k8s":
        files[TRTLLM_OPTIONS] = trtllm_options(launch)
    if launch.engine.name == "phalanx":
        files |= {name: _shipped(name) for name in (_BESIDE if kind in ("compose", "k8s") else _BESIDE[1:])}
    return files


def _shipped(name: str) -> str:
    return (resources.files("phalanx.plan.recipes") / "deploy" / name).read_text(encoding="utf-8")


def _shell(launch: Launch) -> Files:
    if launch.spans_machines:
        return boxes.scripts(launch)
    lines = [
        "#!/usr/bin/env bash",
        f"# {title(launch)}",
        *([f"# Beware: {launch.note}"] if launch.note else []),
        "set -euo pipefail",
        *([boxes.DROP_CACHES] if launch.one_gpu_machines else []),
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
    if not launch.spans_machines:
        raise ConfigError(
            "no_ray_recipe",
            f"{launch.machine.name} needs no Ray: every replica is in one box.",
            "Use --recipe shell, compose, systemd or k8s.",
        )
    return boxes.scripts(launch)


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
