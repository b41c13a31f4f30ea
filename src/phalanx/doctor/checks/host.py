"""The machine around the GPUs: limits, memory, disk, and what a DGX Spark wants."""

from __future__ import annotations

from phalanx.doctor.checks.cpu import is_absence
from phalanx.doctor.checks.products import GIB, MIB, gib, is_spark, whose
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding

_SHM_BYTES = GIB
"""NCCL's shared-memory transport and vLLM's message ring (240 MiB) must both fit."""
_OPEN_FILES = 4096
_SWAPPED_BYTES = GIB
_HUGE_PAGE = 2 * MIB
_HUGE_SHARE = 0.1
_SPARK_SWAPPINESS = 10
_DISK_BYTES = 10 * GIB


def shm(facts: Facts) -> Finding | None:
    """Shared memory, which containers get little of. One GPU needs none."""
    size = facts.system.shm_bytes
    if size is None or len(facts.gpus) < 2:
        return None
    if size < _SHM_BYTES:
        return Finding(
            "warning",
            "shm",
            "/dev/shm is small",
            f"{size / MIB:.0f} MiB",
            "Ranks that cannot read each other's memory talk through it: NCCL fails to start, or a rank dies later of "
            "SIGBUS. Docker gives 64 MiB unless told.",
            "docker run --ipc=host or --shm-size=16g; Kubernetes: an emptyDir of medium Memory on /dev/shm.",
        )
    return Finding("ok", "shm", "/dev/shm", gib(size))


def memlock(facts: Facts) -> Finding | None:
    """RDMA pins memory."""
    limit = facts.system.memlock_bytes
    if limit is None or not any(nic.rdma for nic in facts.network.nics):
        return None
    if limit >= 0:
        return Finding(
            "warning",
            "memlock",
            "Locked memory is limited",
            f"{limit / MIB:.0f} MiB, with RDMA adapters present",
            "RDMA registers memory by locking it: NCCL fails with 'Cannot allocate memory', or falls back to sockets.",
            "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1.",
        )
    return Finding("ok", "memlock", "Locked memory", "unlimited")


def nofile(facts: Facts) -> Finding | None:
    """A client is an open file."""
    limit = facts.system.nofile
    if limit is None:
        return None
    if limit < _OPEN_FILES:
        return Finding(
            "note",
            "nofile",
            "Few open files are allowed",
            f"{limit}",
            "Each client takes one: the server refuses connections when they run out.",
            "ulimit -n 65536; systemd: LimitNOFILE=65536.",
        )
    return Finding("ok", "nofile", "Open files", f"{limit}")


def swap(facts: Facts) -> Finding | None:
    """Pages that were put out to disk come back one by one."""
    used = facts.system.swap_used_bytes
    if used is None:
        return None
    if used > _SWAPPED_BYTES:
        return Finding(
            "warning",
            "swap",
            "The machine swaps",
            f"{gib(used)} of swap in use",
            "A step that touches a swapped page waits for the disk; ranks then look stuck.",
            "Free memory, then swapoff -a && swapon -a; find who needs so much.",
        )
    return Finding("ok", "swap", "Swap", "hardly used" if used else "not used")


def swappiness(facts: Facts) -> Finding | None:
    """On a GB10 the kernel may put weights out to disk."""
    told = facts.system.swappiness
    if not is_spark(facts) or told is None or not facts.system.swap_bytes:
        return None
    if told > _SPARK_SWAPPINESS:
        return Finding(
            "warning",
            "swappiness",
            "The kernel swaps early",
            f"vm.swappiness {told}, {gib(facts.system.swap_bytes)} of swap",
            "GPU and programs share one memory here: under pressure the machine thrashes instead of failing.",
            "sysctl vm.swappiness=1 (and in /etc/sysctl.d), or swapoff -a.",
        )
    return Finding("ok", "swappiness", "vm.swappiness", f"{told}")


def gui(facts: Facts) -> Finding | None:
    """A desktop on a GB10 takes memory that the model could have."""
    if not is_spark(facts) or facts.system.gui is None:
        return None
    if facts.system.gui:
        return Finding(
            "warning",
            "gui",
            "A desktop runs on a DGX Spark",
            "graphical target",
            "It takes gigabytes of the unified memory, and draws on the same GPU.",
            "systemctl set-default multi-user.target, then reboot.",
        )
    return Finding("ok", "gui", "Desktop", "off")


def hugepages(facts: Facts) -> Finding | None:
    """Huge pages that were set aside are lost to everyone else."""
    count, memory = facts.system.hugepages, facts.system.memory_bytes
    if count is None or not memory:
        return None
    held = count * _HUGE_PAGE
    if held > _HUGE_SHARE * memory:
        return Finding(
            "warning",
            "hugepages",
            "Huge pages take memory away",
            f"{count} pages, {gib(held)} if they are of 2 MiB, of {gib(memory)}",
            "Neither weights on the way to the GPUs nor the page cache can use them.",
            "sysctl vm.nr_hugepages=0, unless another program needs them.",
        )
    if facts.system.transparent_hugepages == "never" and not facts.gpus:
        return Finding(
            "note",
            "hugepages",
            "Transparent huge pages are off",
            "never",
            "On a processor every step reads all weights: small pages cost address translations.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding("ok", "hugepages", "Huge pages", "none set aside" if not count else f"{gib(held)} set aside")


def numa(facts: Facts) -> Finding | None:
    """Which socket the GPUs are at."""
    nodes = facts.system.numa_nodes
    known = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None and gpu.numa_node >= 0}
    if not facts.gpus or nodes is None or nodes < 2 or not known:
        return None
    lost = [gpu for gpu in facts.gpus if gpu.numa_node is None or gpu.numa_node < 0]
    if lost:
        return Finding(
            "note",
            "numa",
            "Some GPUs do not tell their socket",
            f"{whose(lost)}; the others are at node {', '.join(map(str, sorted(known)))}",
            "A process far from its GPU copies over the link between sockets.",
            "nvidia-smi topo -m shows their affinity; numactl --cpunodebind binds.",
        )
    if len(known) == 1:
        node = known.pop()
        return Finding(
            "note",
            "numa",
            "All GPUs are at one socket",
            f"node {node} of {nodes}",
            "A server that runs at the other one reaches them over the link between sockets.",
            f"numactl --cpunodebind={node} --membind={node} phalanx serve ...",
        )
    return Finding("ok", "numa", "NUMA", f"GPUs at nodes {', '.join(map(str, sorted(known)))} of {nodes}")


def disk(facts: Facts) -> Finding | None:
    """Room for weights at all; for a named model, see `disk_room`."""
    found = facts.system.disk
    if found is None:
        return None
    if found.free_bytes < _DISK_BYTES:
        return Finding(
            "warning",
            "disk",
            "Little room for weights",
            f"{gib(found.free_bytes)} free at {found.path}",
            "A model of 8 billion weights takes 15 GiB.",
            "Free some, or set HF_HOME to a larger disk.",
        )
    return Finding("ok", "disk", "Disk", f"{gib(found.free_bytes)} free at {found.path}")


def unread(facts: Facts) -> Finding | None:
    """What could not be found out, so that silence is not taken for health. A machine without NVIDIA's is no riddle."""
    unread = [said for said in facts.unread if facts.gpus or not is_absence(said)]
    if not unread:
        return None
    return Finding(
        "note",
        "unread",
        "Not everything could be read",
        " ".join(unread),
        "Checks that need it say nothing.",
        "Run it as a user who may, and outside of containers that hide it.",
    )
