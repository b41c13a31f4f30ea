"""The files of a recipe: shell, docker compose, systemd, Kubernetes, and Ray over several machines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.plan.recipes import boxes, spark
from phalanx.plan.recipes.launch import FIRST_PORT, TRTLLM_OPTIONS, Launch, command, trtllm_options
from phalanx.plan.recipes.words import title, wrapped

Files = dict[str, str]
_VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES", "Intel": "HABANA_VISIBLE_MODULES"}
_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi"}


def recipe(launch: Launch, kind: str) -> Files:
    """File names and their text. The shell script alone needs nothing but the engine."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.3)
        suggestion = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError("unknown_recipe", f"No recipe is called {kind!r}.", f"{suggestion}Known: {', '.join(KINDS)}.")
    if launch.spans_machines:
        boxes.check(launch, kind)
    files = KINDS[kind](launch)
    if launch.engine.name == "trtllm" and kind != "k8s":
        files[TRTLLM_OPTIONS] = trtllm_options(launch)
    if launch.engine.name == "phalanx" and kind in ("compose", "k8s"):
        files["Dockerfile"] = _DOCKERFILE
    return files


def _devices(launch: Launch, replica: int) -> list[str]:
    """GPUs of a replica, by their number on the machine it runs on."""
    if launch.one_gpu_machines:
        return ["0"]
    return [str(device) for device in range(replica * launch.tp, (replica + 1) * launch.tp)]


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
        devices, words = ",".join(_devices(launch, replica)), command(launch, port=FIRST_PORT + replica)
        lines.append(f"{_VISIBLE[launch.vendor]}={devices} {wrapped(words)} &")
    return {"serve.sh": "\n".join([*lines, "wait -n", ""])}


_DOCKERFILE = """FROM python:3.12-slim
RUN pip install --no-cache-dir 'phalanx[serve]'
ENTRYPOINT []
"""


def _compose(launch: Launch) -> Files:
    lines = [f"# {title(launch)}", "services:"]
    for replica in range(launch.replicas):
        words = command(launch, host="0.0.0.0")
        lines += [f"  replica-{replica}:", f"    image: {launch.image}"]
        if launch.engine.name == "phalanx":
            lines.append("    build: .")
        lines += [
            "    entrypoint: []",
            f"    command: {json.dumps(words)}",
            "    ipc: host",
            "    restart: unless-stopped",
            *_compose_network(launch, FIRST_PORT + replica),
            f"    environment: {_compose_environment(launch, _devices(launch, replica))}",
            "    volumes:",
            '      - "${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"',
        ]
        if launch.engine.name == "trtllm":
            lines += [f"      - ./{TRTLLM_OPTIONS}:/app/{TRTLLM_OPTIONS}:ro", "    working_dir: /app"]
        lines += _compose_devices(launch, _devices(launch, replica))
    return {"compose.yaml": "\n".join([*lines, ""])}


def _compose_network(launch: Launch, port: int) -> list[str]:
    """A DGX Spark's container sees its RDMA devices and its host's network, and may pin memory for them."""
    if launch.one_gpu_machines:
        return ["    network_mode: host", "    devices: [/dev/infiniband]", "    ulimits: {memlock: -1}"]
    return [f'    ports: ["127.0.0.1:{port}:{FIRST_PORT}"]']


def _compose_environment(launch: Launch, devices: list[str]) -> str:
    if launch.vendor == "NVIDIA":
        return "[HF_TOKEN]"
    return json.dumps(["HF_TOKEN", f"{_VISIBLE[launch.vendor]}={','.join(devices)}"])


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


def _systemd(launch: Launch) -> Files:
    files = {}
    for replica in range(launch.replicas):
        words = ["/usr/bin/env", *command(launch, port=FIRST_PORT + replica)]
        files[f"{launch.engine.name}-{replica}.service"] = "\n".join(
            [
                "[Unit]",
                f"Description={title(launch)}, replica {replica}",
                "After=network-online.target",
                "Wants=network-online.target",
                "",
                "[Service]",
                f"User={launch.engine.name}",
                f"WorkingDirectory=/var/lib/{launch.engine.name}",
                f"StateDirectory={launch.engine.name}",
                f"Environment={_VISIBLE[launch.vendor]}={','.join(_devices(launch, replica))}",
                f"Environment=HF_HOME=/var/lib/{launch.engine.name}",
                f"Environment=PATH=/opt/{launch.engine.name}/bin:/usr/local/bin:/usr/bin:/bin",
                *(
                    ["ExecStartPre=+/bin/sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"]
                    if launch.one_gpu_machines
                    else []
                ),
                f"ExecStart={shlex.join(words)}",
                "Restart=on-failure",
                "RestartSec=10",
                "LimitMEMLOCK=infinity",
                "NoNewPrivileges=true",
                "ProtectSystem=full",
                "",
                "[Install]",
                "WantedBy=multi-user.target",
                "",
            ]
        )
    return files


def _kubernetes(launch: Launch) -> Files:
    if launch.spans_machines:
        return boxes.kubernetes_files(launch)
    name = re.sub(r"[^a-z0-9]+", "-", launch.model.rpartition("/")[2].lower()).strip("-")[:50]
    words = json.dumps(command(launch, host="0.0.0.0"))
    options = _kubernetes_options(launch, name) if launch.engine.name == "trtllm" else ""
    mount = (
        f"\n            - {{name: options, mountPath: /app/{TRTLLM_OPTIONS}, subPath: {TRTLLM_OPTIONS}}}"
        if options
        else ""
    )
    volume = f"\n        - {{name: options, configMap: {{name: {name}}}}}" if options else ""
    text = f"""# {title(launch)}
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {launch.replicas}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      containers:
        - name: engine
          image: {launch.image}
          command: {words}
          workingDir: /app
          ports: [{{containerPort: {FIRST_PORT}}}]
          resources: {{limits: {{{_RESOURCES[launch.vendor]}: {launch.tp}}}}}
          readinessProbe: {{httpGet: {{path: /health, port: {FIRST_PORT}}}, periodSeconds: 10}}
          startupProbe: {{httpGet: {{path: /health, port: {FIRST_PORT}}}, periodSeconds: 10, failureThreshold: 180}}
          env:
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hugging-face, key: token, optional: true}}}}
          volumeMounts:
            - {{name: shm, mountPath: /dev/shm}}{mount}
      volumes:
        - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: 16Gi}}}}{volume}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  selector: {{app: {name}}}
  ports: [{{port: 80, targetPort: {FIRST_PORT}}}]
"""
    return {"kubernetes.yaml": text + options}


def _kubernetes_options(launch: Launch, name: str) -> str:
    indented = "".join(f"    {line}\n" for line in trtllm_options(launch).splitlines())
    return f"---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n  {TRTLLM_OPTIONS}: |\n{indented}"


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
    "systemd": _systemd,
    "k8s": _kubernetes,
    "ray": _ray,
}
