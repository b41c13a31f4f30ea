"""A cluster of DGX Spark as files: network, limits, services, hosts.toml and the serve command of a model that fits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.commands import ray_environment, ray_start, serve_environment, serve_options, wait_for_all
from phalanx.cluster.hosts import Cluster, Node, parse_hosts
from phalanx.cluster.readme import readme
from phalanx.errors import ConfigError
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Plan
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.plan.recipes import Launch, command, spark
from phalanx.plan.record import launch_of
from phalanx.spec.formats import FORMATS
from phalanx.spec.machine import Machine

_VENV = "/opt/phalanx"
_STATE = "/var/lib/phalanx"
_USER = "phalanx"
_MOST_NODES = 8
_INPUT_TOKENS, _OUTPUT_TOKENS, _CONCURRENCY = 7168, 1024, 16
_JOIN_PATIENCE_S = 600


@dataclass(frozen=True)
class Recipe:
    """Files by name, and what to know before using them."""

    files: dict[str, str]
    plan: Plan
    warnings: tuple[str, ...]


def recipe(machine_name: str, model: str | None = None) -> Recipe:
    """All files of a cluster that serves `model` (default: the largest of the catalog that fits) over every machine."""
    machine = _machine(machine_name)
    plan = _plan(machine, model or default_model(machine))
    hosts = _hosts_toml(len(machine))
    cluster = parse_hosts(hosts, Path("hosts.toml"))
    launch = launch_of(plan, plan.candidates[0])
    serve = [f"{_VENV}/bin/phalanx", *command(launch, extra=tuple(serve_options(cluster)))[1:]]
    warnings = tuple(_warnings(machine))
    files = {"README.md": readme(plan, launch, cluster, serve, warnings), "hosts.toml": hosts}
    files["serve.sh"] = _serve_script(cluster, serve)
    files |= spark.system_files()
    for number, node in enumerate(cluster.nodes):
        files[f"node-{number}/{spark.NETPLAN}"] = spark.netplan(number)
        files[f"node-{number}/phalanx-ray.service"] = _ray_unit(cluster, node)
    files["node-0/phalanx-serve.service"] = _serve_unit(cluster, launch, serve)
    return Recipe(files, plan, warnings)


def _machine(name: str) -> Machine:
    machine = Machine.parse(name)
    if {gpu.name for gpu in machine.gpus} != {"DGX-Spark"}:
        raise ConfigError(
            "no_cluster_recipe",
            f"There is no cluster recipe for {machine.name}.",
            "Use 2xDGX-Spark to 8xDGX-Spark; for GPUs of one machine: phalanx plan --recipe.",
        )
    if not 2 <= len(machine) <= _MOST_NODES:
        raise ConfigError(
            "no_cluster_recipe",
            f"A cluster of {len(machine)} DGX Spark is not written here.",
            f"Use 2 to {_MOST_NODES}; one alone needs no cluster: phalanx serve MODEL.",
        )
    return machine


def _warnings(machine: Machine) -> list[str]:
    if len(machine) == 3:
        return [
            "Three machines need a switch for these files. In a ring every cable is a subnet of its own: Ray and gloo "
            "have no common network, and NCCL reaches half the rate (10 GB/s is a pass there): it is not written here."
        ]
    if len(machine) > 4:
        return ["More than four machines were not measured by anyone we know of: expect less from each one added."]
    return []


def default_model(machine: Machine) -> str:
    """The checkpoint with the most parameters that Phalanx runs and that fits, in its smallest format. Not in four
    bits, which change answers more than who named no model may want, nor by ModelOpt: none was tried.
    """
    engine, found = ENGINES["phalanx"], []
    formats = [name for name in engine.weight_formats if FORMATS[name].bits >= 8]
    for entry in catalog.entries().values():
        for number_format in formats:
            checkpoint = entry.checkpoint(number_format)
            if checkpoint is None or checkpoint.startswith("nvidia/"):
                continue
            if engine.refusal(entry.spec, number_format, "bf16") is not None:
                continue
            context = _INPUT_TOKENS + _OUTPUT_TOKENS
            fitted = fit(entry.spec, machine, len(machine), engine, weight_format=number_format, context=context)
            if fitted.fits and entry.spec.max_positions >= context:
                found.append((entry.spec.parameters, -FORMATS[number_format].bits, checkpoint))
    return max(found)[2]


def _plan(machine: Machine, model: str) -> Plan:
    """In the formats that there are checkpoints in: nothing is converted while loading."""
    own, entry = catalog.model(model).number_format, catalog.find(model)
    formats = ENGINES["phalanx"].weight_formats
    others = [name for name in formats if entry and entry[0].checkpoint(name)]
    plan = ask(
        PlanQuestion(
            model=model,
            machine=machine.name,
            input_tokens=_INPUT_TOKENS,
            output_tokens=_OUTPUT_TOKENS,
            concurrency=_CONCURRENCY,
            engines="phalanx",
            tps=str(len(machine)),
            formats=",".join(dict.fromkeys((own, *others))),
        )
    )
    if plan.best is None:
        reasons = {f"{each.weight_format}: {each.found}": each.fix for each in plan.excluded}
        raise ConfigError(
            plan.excluded[0].code,
            f"{model} cannot be served on {machine.name} at TP={len(machine)}. {' '.join(reasons)}",
            f"{plan.excluded[0].fix} The largest that fits here: {default_model(machine)}.",
        )
    return plan


def _hosts_toml(nodes: int) -> str:
    entries = [
        f'[[node]]\nhost = "spark-{number}"\nip = "{spark.address(number)}"\ngpus = 1\n' for number in range(1, nodes)
    ]
    rdma = ", ".join(f'"{name}"' for name in spark.RDMA)
    return f"""# The cluster, as phalanx cluster reads it. Run phalanx cluster on the head, as user {_USER}.
[cluster]
interface = "{spark.INTERFACES[0]}"
rdma = [{rdma}]
user = "{_USER}"
python = "{_VENV}/bin/python"
folder = "{_STATE}"
token_file = "{_STATE}/cluster.token"

[cluster.environment]
HF_HOME = "{_STATE}/huggingface"

[[node]]
host = "local"
ip = "{spark.address(0)}"
gpus = 1
head = true

{chr(10).join(entries)}"""


def _serve_script(cluster: Cluster, serve: list[str]) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in serve_environment(cluster).items())
    return (
        f"#!/usr/bin/env bash\n# On the head ({cluster.head.ip}), once phalanx cluster status shows every node up.\n"
        f"set -euo pipefail\nulimit -l unlimited\n{exports}exec {shlex.join(serve)}\n"
    )


def _ray_unit(cluster: Cluster, node: Node) -> str:
    what = "head" if node.is_head else "worker"
    return _unit(
        f"Ray {what} {node.ip} of the Phalanx cluster",
        environment=ray_environment(node),
        before=["/usr/bin/test", "-s", node.token_path],
        start=ray_start(cluster, node, block=True),
    )


def _serve_unit(cluster: Cluster, launch: Launch, serve: list[str]) -> str:
    return _unit(
        f"Phalanx serves {launch.model} over {len(cluster.nodes)} machines",
        environment=serve_environment(cluster),
        before=wait_for_all(cluster, _JOIN_PATIENCE_S),
        start=serve,
        needs="phalanx-ray.service",
    )


def _unit(what: str, environment: Mapping[str, str], before: list[str], start: list[str], needs: str = "") -> str:
    """A service. Each failed start leaks GPU pages on GB10, and some 35 in a row end ssh: five an hour, ever later."""
    after = f"network-online.target {needs}".strip()
    lines = ["[Unit]", f"Description={what}", f"After={after}", "Wants=network-online.target"]
    lines += [f"Requires={needs}"] if needs else []
    lines += ["StartLimitIntervalSec=3600", "StartLimitBurst=5", "", "[Service]", "Type=exec", f"User={_USER}"]
    lines += ["StateDirectory=phalanx", "StateDirectoryMode=0700", f"WorkingDirectory={_STATE}"]
    lines += [f'Environment="{name}={value}"' for name, value in environment.items()]
    lines += [f"ExecStartPre={shlex.join(before)}", f"ExecStart={shlex.join(start)}"]
    lines += [f"TimeoutStartSec={_JOIN_PATIENCE_S + 120}", "TimeoutStopSec=60"]
    lines += ["Restart=on-failure", "RestartSec=30", "RestartSteps=4", "RestartMaxDelaySec=600"]
    lines += ["LimitMEMLOCK=infinity", "LimitNOFILE=1048576", "NoNewPrivileges=true", "ProtectSystem=full"]
    return "\n".join([*lines, "", "[Install]", "WantedBy=multi-user.target", ""])
