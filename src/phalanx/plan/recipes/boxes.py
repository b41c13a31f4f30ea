"""Replicas that span boxes of several GPUs: Ray on their own systems, or a LeaderWorkerSet of Kubernetes."""

from __future__ import annotations

import json
import re

from phalanx.errors import ConfigError
from phalanx.plan.recipes.launch import FIRST_PORT, Launch, command
from phalanx.plan.recipes.words import title, wrapped

_RAY_PORT = 6379


def _check(launch: Launch) -> None:
    if launch.engine.name != "vllm":
        raise ConfigError(
            "no_ray_recipe",
            f"{launch.engine.title} over several boxes has no recipe here.",
            "Use --engine vllm, or --tp so that a replica stays in one box.",
        )


def ray_files(launch: Launch) -> dict[str, str]:
    """One script a replica, the same on all of its boxes: told who leads, they find each other."""
    _check(launch)
    return {f"replica-{replica}.sh": _script(launch) for replica in range(launch.replicas)}


def _script(launch: Launch) -> str:
    serve = wrapped(command(launch, host="0.0.0.0", extra=("--distributed-executor-backend", "ray")))
    network = launch.machine.network
    assert network is not None, "a replica spans boxes only where there is a network"
    over = (
        "export NCCL_IB_DISABLE=1"
        if network.kind == "ethernet"
        else "export NCCL_IB_DISABLE=0 NCCL_IB_HCA=${HCA:-mlx5}"
    )
    return f"""#!/usr/bin/env bash
# {title(launch)}, {network.name} between {launch.nodes} boxes
# Run on every box of this replica, first where it serves:
#   LEADER=10.0.0.1 INTERFACE=eth0 bash replica-0.sh
# INTERFACE carries the address of this box; HCA names its InfiniBand or RoCE ports (ibv_devices).
# Before: ray get-auth-token --generate on the leader, and the same ~/.ray/auth_token (mode 600) on all.
set -euo pipefail
: "${{LEADER:?address of the box that serves}}" "${{INTERFACE:?such as eth0: ip -4 addr}}"
ulimit -l unlimited
SELF=$(ip -4 -o addr show "$INTERFACE" | grep -oP '(?<=inet )[0-9.]+')
export VLLM_HOST_IP=$SELF NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
{over}
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

if [ "$SELF" != "$LEADER" ]; then
  exec ray start --block --address="$LEADER:{_RAY_PORT}" --node-ip-address="$SELF" --num-gpus={launch.per_node}
fi
ray start --head --port={_RAY_PORT} --node-ip-address="$SELF" --num-gpus={launch.per_node} --include-dashboard=false
until [ "$(ray status | grep -c ' node_')" -ge {launch.nodes} ]; do sleep 2; done
exec {serve}
"""


def kubernetes_files(launch: Launch) -> dict[str, str]:
    """A group of pods a replica, one a box (leaderworkerset.sigs.k8s.io): the first leads Ray and serves."""
    _check(launch)
    name = re.sub(r"[^a-z0-9]+", "-", launch.model.rpartition("/")[2].lower()).strip("-")[:50]
    serve = " ".join(command(launch, host="0.0.0.0", extra=("--distributed-executor-backend", "ray")))
    lead = (
        f"ray start --head --port={_RAY_PORT} --num-gpus={launch.per_node} --include-dashboard=false && "
        f"until [ \"$(ray status | grep -c ' node_')\" -ge {launch.nodes} ]; do sleep 2; done && exec {serve}"
    )
    follow = f"exec ray start --block --address=$LWS_LEADER_ADDRESS:{_RAY_PORT} --num-gpus={launch.per_node}"
    probe = f"httpGet: {{path: /health, port: {FIRST_PORT}}}, periodSeconds: 10"
    return {
        "kubernetes.yaml": f"""# {title(launch)}; needs the LeaderWorkerSet controller
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {{name: {name}}}
spec:
  replicas: {launch.replicas}
  leaderWorkerTemplate:
    size: {launch.nodes}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      metadata: {{labels: {{app: {name}, role: leader}}}}
      spec:
{_pod(launch, lead, f"          readinessProbe: {{{probe}}}")}
    workerTemplate:
      spec:
{_pod(launch, follow)}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  selector: {{app: {name}, role: leader}}
  ports: [{{port: 80, targetPort: {FIRST_PORT}}}]
"""
    }


def _pod(launch: Launch, script: str, probe: str = "") -> str:
    lines = [
        "        hostNetwork: true",
        "        dnsPolicy: ClusterFirstWithHostNet",
        "        containers:",
        "        - name: engine",
        f"          image: {launch.image}",
        f"          command: {json.dumps(['bash', '-c', script])}",
        f"          ports: [{{containerPort: {FIRST_PORT}}}]",
        f"          resources: {{limits: {{nvidia.com/gpu: {launch.per_node}}}}}",
        "          securityContext: {capabilities: {add: [IPC_LOCK]}}",
        "          env:",
        "            - name: HF_TOKEN",
        "              valueFrom: {secretKeyRef: {name: hugging-face, key: token, optional: true}}",
        *([probe] if probe else []),
        "          volumeMounts: [{name: shm, mountPath: /dev/shm}]",
        "        volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}]",
    ]
    return "\n".join(lines)
