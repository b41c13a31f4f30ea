"""The order of steps that goes with a cluster recipe, with a check after each. Its text is `spark.md`."""

from __future__ import annotations

import shlex
from importlib.resources import files
from string import Template
from textwrap import fill

from phalanx.cluster.hosts import Cluster
from phalanx.plan.candidates import Plan
from phalanx.plan.engines import GIB
from phalanx.plan.recipes import Launch, spark
from phalanx.version import __version__


def readme(plan: Plan, launch: Launch, cluster: Cluster, serve: list[str], warnings: tuple[str, ...]) -> str:
    nodes = len(cluster.nodes)
    text = (files("phalanx.cluster") / "spark.md").read_text(encoding="utf-8")
    return Template(text).substitute(
        version=__version__,
        model=launch.model,
        nodes=nodes,
        warnings="".join(f"> **Warning.** {warning}\n\n" for warning in warnings),
        summary=_summary(plan),
        cables=_DIRECT if nodes == 2 else _SWITCH.format(nodes=nodes),
        joint="a direct cable" if nodes == 2 else "a switch",
        netplan=spark.NETPLAN,
        sysctl=spark.SYSCTL,
        limits=spark.LIMITS,
        rdma0=spark.RDMA[0],
        rdma1=spark.RDMA[1],
        if0=spark.INTERFACES[0],
        if1=spark.INTERFACES[1],
        net0=spark.NETWORKS[0],
        net1=spark.NETWORKS[1],
        head=spark.address(0),
        peer0=spark.address(1),
        peer1=spark.address(1, 1),
        workers=" ".join(node.ip for node in cluster.workers),
        others=", ".join(node.host for node in cluster.workers),
        serve=shlex.join(serve),
    )


_DIRECT = f"""One QSFP cable between the same ports of both machines, the port that `ibdev2netdev` shows as
`{spark.INTERFACES[0]}`. No switch."""
_SWITCH = """A switch with at least {nodes} ports of 200G in one bridge, jumbo frames on, and a cable from the same port
of every machine. Many switches negotiate 100G: force 200G-baseCR4, autoneg off. A ring of four works only with a
third-party NCCL plugin and is not described here."""


def _summary(plan: Plan) -> str:
    best = plan.candidates[0]
    tight, prediction, workload = best.fit.tightest, best.prediction, plan.workload
    low, high = prediction.throughput.low, prediction.throughput.high
    sentences = [
        f"The planner: {best.weight_format} at TP={best.tp}, {tight.weight_bytes / GIB:.0f} GiB of weights a machine, "
        f"{tight.kv_bytes / GIB:.0f} GiB for its KV ({best.fit.kv_tokens:,} tokens).",
        f"With {workload.concurrency} requests of {workload.input_tokens} + {workload.output_tokens} tokens at once: "
        f"{best.throughput:.0f} tokens/s (90 %: {low:.0f} to {high:.0f}), and {prediction.all_reduce_share:.0%} of a "
        "decode step is all-reduce.",
        "These are predictions: nothing was measured on such machines.",
    ]
    return fill(" ".join(sentences), width=120)
