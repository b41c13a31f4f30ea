"""Checks: each is a pure function from facts to findings. What cannot be told from the facts yields nothing, or a note.

The tuples below are all there are, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from phalanx.doctor.checks import (
    across,
    cpu,
    deployment,
    engines,
    fabric,
    firmware,
    gpus,
    host,
    links,
    measured,
    memory,
    network,
    power,
    serving,
    software,
    watched,
)
from phalanx.doctor.checks.deployment import Deployment
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding

__all__ = ["ACROSS_CHECKS", "CHECKS", "DEPLOYMENT_CHECKS", "Deployment", "judge", "judge_together", "worst_first"]

Found = Finding | Iterable[Finding] | None

CHECKS: tuple[Callable[[Facts], Found], ...] = (
    gpus.names,
    gpus.lost_gpus,
    cpu.cpu_serving,
    cpu.cpu_instructions,
    gpus.mig,
    memory.ecc,
    memory.ecc_errors,
    memory.remapped_rows,
    gpus.xids,
    links.nvlinks,
    links.nvlink_errors,
    links.topology,
    links.p2p,
    links.iommu,
    fabric.fabric_manager,
    fabric.fabric_state,
    power.throttle,
    power.temperature,
    power.power_limit,
    power.power_supply,
    gpus.pcie_width,
    gpus.persistence,
    memory.gpu_memory,
    memory.unified_memory,
    software.driver_for_torch,
    software.torch_for_gpu,
    software.torch_gpus,
    software.nccl,
    software.ray,
    engines.engine_versions,
    firmware.firmware,
    watched.watched,
    host.shm,
    host.memlock,
    host.nofile,
    host.swap,
    host.swappiness,
    host.gui,
    host.hugepages,
    host.numa,
    host.disk,
    network.link_speed,
    network.mtu,
    network.jumbo,
    network.roce_functions,
    network.socket_interface,
    network.rdma_devices,
    network.p2p_switched_off,
    measured.problem,
    measured.corruption,
    measured.memory_rate,
    measured.matmul_rate,
    measured.fp8_rate,
    measured.straggler,
    measured.all_reduce,
    serving.time_outs,
    serving.deaths,
    serving.below_plan,
    host.unread,
)

DEPLOYMENT_CHECKS: tuple[Callable[[Facts, Deployment], Found], ...] = (
    deployment.gpus_planned,
    deployment.gpu_count,
    deployment.kernels,
    deployment.number_format,
    engines.fp8_engine,
    deployment.shapes,
    deployment.fits,
    deployment.tp_links,
    deployment.single_stream,
    deployment.fp8_gain,
    deployment.disk_room,
    deployment.cpu_memory,
)

ACROSS_CHECKS: tuple[Callable[[Sequence[Facts]], Found], ...] = (
    across.hostnames,
    across.addresses,
    across.subnets,
    across.same_mtu,
    across.versions,
    across.same_gpus,
)

_WORST_FIRST = ("error", "warning", "note", "ok")


def judge(facts: Facts, deployment: Deployment | None = None) -> list[Finding]:
    """Everything there is to say about one machine, and about a deployment on it, worst first."""
    found = [finding for check in CHECKS for finding in _listed(check(facts))]
    if deployment is not None:
        found += [finding for check in DEPLOYMENT_CHECKS for finding in _listed(check(facts, deployment))]
    return worst_first(found)


def judge_together(machines: Sequence[Facts]) -> list[Finding]:
    """What concerns several machines at once, worst first."""
    return worst_first([finding for check in ACROSS_CHECKS for finding in _listed(check(machines))])


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.level))


def _listed(found: Found) -> Iterator[Finding]:
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield from found
