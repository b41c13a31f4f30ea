"""Replicas that span boxes: each engine's own way over several of them, on their systems or in Kubernetes."""

from __future__ import annotations

import json
import re

from phalanx.errors import ConfigError
from phalanx.plan.recipes import spark
from phalanx.plan.recipes.fabric import fabric_environment
from phalanx.plan.recipes.launch import FIRST_PORT, TRTLLM_OPTIONS, Launch, command
from phalanx.plan.recipes.words import title, wrapped

_RAY_PORT, _MEETING_PORT = 6379, 29500
WAYS = {"vllm": ("ray", "k8s"), "sglang": ("shell", "k8s"), "trtllm": ("shell",), "phalanx": ("ray",)}
"""Which recipes each engine has over several boxes: by Ray, or by what it brings itself."""
_RAY = {
    "vllm": ("--distributed-executor-backend", "ray"),
    "phalanx": ("--executor", "ray", "--interface", "$INTERFACE"),
}
DROP_CACHES = "sync && echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null"
"""The GPU's memory is the system's: what the page cache holds, the engine cannot take."""


def check(launch: Launch, kind: str) -> None:
    """Raise where this engine has no such recipe for a replica on several boxes."""
    ways = WAYS[launch.engine.name]
    if launch.one_gpu_machines:
        ways = tuple(way for way in ways if way != "k8s")
    if kind not in ways:
        raise ConfigError(
            "needs_other_recipe",
            f"A replica on {launch.machine.name} spans {launch.nodes} machines: {launch.engine.title} has no {kind} "
            "recipe for that.",
            f"Use --recipe {' or '.join(ways)}, another --engine, or a lower --tp.",
        )


def scripts(launch: Launch) -> dict[str, str]:
    """One script a replica, and on DGX Spark the files of its network."""
    write = {"vllm": _ray, "phalanx": _ray, "sglang": _nodes, "trtllm": _mpi}[launch.engine.name]
    files = {f"replica-{replica}.sh": write(launch) for replica in range(launch.replicas)}
    if launch.one_gpu_machines:
        nodes = range(launch.nodes * launch.replicas)
        files |= {f"node-{node}/{spark.NETPLAN}": spark.netplan(node) for node in nodes} | spark.system_files()
    return files


def _head(launch: Launch, before: str) -> str:
    """What every box does first: who it is, and over which network collectives go."""
    network = launch.machine.network
    over = f", {network.name} between" if network is not None else " in"
    interface = f"${{INTERFACE:={spark.INTERFACES[0]}}}" if launch.one_gpu_machines else "${INTERFACE:?such as eth0}"
    example = spark.address(0) if launch.one_gpu_machines else "10.0.0.1"
    note = f"# Beware: {launch.note}\n" if launch.note else ""
    return f"""#!/usr/bin/env bash
# {title(launch)}{over} {launch.nodes} boxes
{note}# Run on every box of this replica, first where it serves:
#   LEADER={example} INTERFACE={spark.INTERFACES[0] if launch.one_gpu_machines else "eth0"} bash replica-0.sh
# INTERFACE carries the address of this box; HCA names its InfiniBand or RoCE ports (ibv_devices).
{before}set -euo pipefail
: "${{LEADER:?address of the box that serves}}" "{interface}"
ulimit -l unlimited
{DROP_CACHES if launch.one_gpu_machines else ""}
SELF=$(ip -4 -o addr show "$INTERFACE" | grep -oP '(?<=inet )[0-9.]+')
{_fabric(launch)}"""


def _fabric(launch: Launch) -> str:
    network = launch.machine.network
    rdma = "${HCA:-" + (",".join(spark.RDMA) if launch.one_gpu_machines else "mlx5") + "}"
    slow = network is not None and network.kind == "ethernet"
    told = fabric_environment("$INTERFACE", () if slow else (rdma,))
    if slow:
        told["NCCL_IB_DISABLE"] = "1"
    if launch.one_gpu_machines and not slow:
        told["NCCL_IB_SUBNET_AWARE_ROUTING"] = "1"
    return "\n".join(f"export {name}={value}" for name, value in told.items())


_TOKEN = "# Before: ray get-auth-token --generate on the leader, and the same ~/.ray/auth_token (mode 600) on all.\n"


def _ray(launch: Launch) -> str:
    serve = _unquoted(wrapped(command(launch, host="0.0.0.0", extra=_by_ray(launch))))
    own = "export VLLM_HOST_IP=$SELF\n" if launch.engine.name == "vllm" else ""
    return f"""{_head(launch, _TOKEN)}
{own}export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0

if [ "$SELF" != "$LEADER" ]; then
  exec ray start --block --address="$LEADER:{_RAY_PORT}" --node-ip-address="$SELF" --num-gpus={launch.per_node}
fi
ray start --head --port={_RAY_PORT} --node-ip-address="$SELF" --num-gpus={launch.per_node} --include-dashboard=false
until [ "$(ray status | grep -c ' node_')" -ge {launch.nodes} ]; do sleep 2; done
exec {serve}
"""


def _by_ray(launch: Launch) -> tuple[str, ...]:
    if launch.attention_ranks > 1:
        return "--data-parallel-backend", "ray"
    return _RAY[launch.engine.name]


def _unquoted(words: str) -> str:
    """Variables of the script stay variables."""
    return words.replace("'$INTERFACE'", '"$INTERFACE"').replace("'$RANK'", '"$RANK"').replace("'$MEET'", '"$MEET"')


def _nodes(launch: Launch) -> str:
    """SGLang: the same command on every box, which is told its number."""
    meet = ("--nnodes", str(launch.nodes), "--node-rank", "$RANK", "--dist-init-addr", "$MEET")
    serve = _unquoted(wrapped(command(launch, host="0.0.0.0", extra=meet)))
    before = f"# RANK is 0 on the leader, then 1 to {launch.nodes - 1}.\n"
    return f"""{_head(launch, before)}
: "${{RANK:?number of this box, 0 for the leader}}"
MEET=$LEADER:{_MEETING_PORT}
exec {serve}
"""


def _mpi(launch: Launch) -> str:
    """TensorRT-LLM: mpirun on the leader starts a rank a GPU on all boxes, over ssh."""
    serve = wrapped(command(launch, host="0.0.0.0"))
    before = (
        f"# Here alone, on the leader: HOSTS names all {launch.nodes} boxes, as a:8,b:8 (host:GPUs). ssh must need\n"
    )
    before += f"# no password, and the folder of {TRTLLM_OPTIONS} must be the same on all.\n"
    return f"""{_head(launch, before)}
: "${{HOSTS:?such as 10.0.0.1:{launch.per_node},10.0.0.2:{launch.per_node}}}"
exec mpirun -n {launch.gpus} -H "$HOSTS" -x HF_TOKEN -x PATH \\
    -x NCCL_SOCKET_IFNAME -x NCCL_IB_DISABLE -x NCCL_IB_HCA -x NCCL_IB_GID_INDEX -x UCX_NET_DEVICES \\
    trtllm-llmapi-launch {serve}
"""


def kubernetes_files(launch: Launch) -> dict[str, str]:
    """A group of pods a replica, one a box (leaderworkerset.sigs.k8s.io): the first leads and serves."""
    name = re.sub(r"[^a-z0-9]+", "-", launch.model.rpartition("/")[2].lower()).strip("-")[:50]
    lead, follow = _pods_by_number(launch) if launch.engine.name == "sglang" else _pods_by_ray(launch)
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


def _pods_by_ray(launch: Launch) -> tuple[str, str]:
    serve = " ".join(command(launch, host="0.0.0.0", extra=_by_ray(launch)))
    lead = (
        f"ray start --head --port={_RAY_PORT} --num-gpus={launch.per_node} --include-dashboard=false && "
        f"until [ \"$(ray status | grep -c ' node_')\" -ge {launch.nodes} ]; do sleep 2; done && exec {serve}"
    )
    return lead, f"exec ray start --block --address=$LWS_LEADER_ADDRESS:{_RAY_PORT} --num-gpus={launch.per_node}"


def _pods_by_number(launch: Launch) -> tuple[str, str]:
    meet = f"$LWS_LEADER_ADDRESS:{_MEETING_PORT}"
    extra = ("--nnodes", str(launch.nodes), "--node-rank", "$LWS_WORKER_INDEX", "--dist-init-addr", meet)
    serve = "exec " + " ".join(command(launch, host="0.0.0.0", extra=extra))
    return serve, serve


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
