"""Manifests for Kubernetes: a deployment with its service, the volume for its weights, and what protects them."""

from __future__ import annotations

import json
import re

from phalanx.plan.recipes import boxes
from phalanx.plan.recipes.launch import ADMIN_PORT, FIRST_PORT, TRTLLM_OPTIONS, Launch, command, trtllm_options
from phalanx.plan.recipes.words import title

_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi"}
_KEYS = "/etc/phalanx/keys"
_UID = 10001
"""The user of Phalanx's Containerfile."""


def kubernetes_files(launch: Launch) -> dict[str, str]:
    if launch.spans_machines:
        return boxes.kubernetes_files(launch)
    name = re.sub(r"[^a-z0-9]+", "-", launch.model.rpartition("/")[2].lower()).strip("-")[:50]
    parts = [_deployment(launch, name), _service(launch, name), _volume(launch, name), _budget(name)]
    if launch.engine.name == "trtllm":
        parts.append(_options(launch, name))
    return {"kubernetes.yaml": f"# {title(launch)}\n{_before(launch, name)}" + "---\n".join(parts)}


def _before(launch: Launch, name: str) -> str:
    if launch.engine.name != "phalanx":
        return ""
    return f"# Before: kubectl create secret generic {name}-keys --from-file=keys (a file as for --api-key-file)\n"


def _deployment(launch: Launch, name: str) -> str:
    words = command(launch, host="0.0.0.0")
    pod, container, mounts, volumes = "", "", "", ""
    probe, start = "path: /health, port: 8000", ""
    if launch.engine.name == "phalanx":
        words = command(
            launch, host="0.0.0.0", extra=("--admin-port", str(ADMIN_PORT), "--api-key-file", f"{_KEYS}/keys")
        )
        probe = f"path: /ready, port: {ADMIN_PORT}"
        start = f"""
          livenessProbe: {{httpGet: {{path: /live, port: {ADMIN_PORT}}}, periodSeconds: 10, failureThreshold: 6}}"""
        pod = f"""
      terminationGracePeriodSeconds: 60
      securityContext: {{runAsNonRoot: true, runAsUser: {_UID}, fsGroup: {_UID}}}"""
        container = """
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"""
        mounts = f"\n            - {{name: keys, mountPath: {_KEYS}, readOnly: true}}"
        volumes = f"\n        - {{name: keys, secret: {{secretName: {name}-keys}}}}"
    if launch.engine.name == "trtllm":
        mounts = f"\n            - {{name: options, mountPath: /app/{TRTLLM_OPTIONS}, subPath: {TRTLLM_OPTIONS}}}"
        volumes = f"\n        - {{name: options, configMap: {{name: {name}}}}}"
    scraped = ADMIN_PORT if launch.engine.name == "phalanx" else FIRST_PORT
    ports = sorted({FIRST_PORT, scraped})
    return f"""apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {launch.replicas}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata:
      labels: {{app: {name}}}
      annotations: {{prometheus.io/scrape: "true", prometheus.io/port: "{scraped}"}}
    spec:{pod}
      containers:
        - name: engine
          image: {launch.image}
          command: {json.dumps(words)}
          workingDir: /app
          ports: [{", ".join(f"{{containerPort: {port}}}" for port in ports)}]
          resources: {{limits: {{{_RESOURCES[launch.vendor]}: {launch.gpus}}}}}{container}
          readinessProbe: {{httpGet: {{{probe}}}, periodSeconds: 10}}
          startupProbe: {{httpGet: {{{probe}}}, periodSeconds: 10, failureThreshold: 180}}{start}
          env:
            - {{name: HF_HOME, value: /models}}
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hugging-face, key: token, optional: true}}}}
          volumeMounts:
            - {{name: shm, mountPath: /dev/shm}}
            - {{name: models, mountPath: /models}}{mounts}
      volumes:
        - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: 16Gi}}}}
        - {{name: models, persistentVolumeClaim: {{claimName: {name}-models}}}}{volumes}
"""


def _service(launch: Launch, name: str) -> str:
    return f"""apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  selector: {{app: {name}}}
  ports: [{{port: 80, targetPort: {FIRST_PORT}}}]
"""


def _volume(launch: Launch, name: str) -> str:
    """For the weights: pods on several machines must all be able to mount it."""
    mode = "ReadWriteMany" if launch.replicas > 1 else "ReadWriteOnce"
    return f"""apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}-models}}
spec:
  accessModes: [{mode}]
  resources: {{requests: {{storage: 500Gi}}}}
"""


def _budget(name: str) -> str:
    """Drained machines take one replica at a time along."""
    return f"""apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{name: {name}}}
spec:
  maxUnavailable: 1
  selector: {{matchLabels: {{app: {name}}}}}
"""


def _options(launch: Launch, name: str) -> str:
    indented = "".join(f"    {line}\n" for line in trtllm_options(launch).splitlines())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n  {TRTLLM_OPTIONS}: |\n{indented}"
