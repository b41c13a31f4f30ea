"""Small command outputs of our own, in every form that drivers print."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

TOPOLOGY_TWO_ISLANDS = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tPHB\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \t\t\t\t\n" + LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)

TOPOLOGY_SPACES = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NODE    8-15,24-31      1               N/A
GPU1    NODE     X      0-7,16-23       0               N/A
"""

TOPOLOGY_CPUSET = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\t\t1\t\tN/A\n"
    "GPU1\tNV18\t X \t4\t0\t\tN/A\n"
)

TOPOLOGY_OLD_NAMES = (
    "     GPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tPIX\tNODE\t0,2,4\t0\n"
    "GPU1\tPIX\t X \tSYS\t1,3,5\t1\n"
    "mlx5_0\tNODE\tSYS\t X \t\t\n"
)

PEERS_MIXED = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tNS\t\n GPU2\tCNS\tNS\tX\t\n" + LEGEND

UUIDS = [f"GPU-{i:08x}-0000-4000-8000-00000000000{i}" for i in range(4)]

LINKS_BRIDGED = "".join(
    f"GPU {gpu}: NVIDIA H100 PCIe (UUID: {UUIDS[gpu]})\n"
    + "".join(f"\t Link {i}: {'<inactive>' if i in (4, 5) else '26.562 GB/s'}\n" for i in range(8))
    for gpu in range(2)
)

LINKS_MIXED = (
    f"GPU 0: NVIDIA GeForce RTX 3090 (UUID: {UUIDS[0]})\n"
    "NVML: Unable to retrieve NVLink information as all links are inActive\n"
    f"GPU 1: NVIDIA GeForce RTX 3090 (UUID: {UUIDS[1]})\n"
    "         Link 0: 14.062 GB/s\n"
    "         Link 1: Inactive\n"
    f"GPU 2: NVIDIA GeForce RTX 4090 (UUID: {UUIDS[2]})\n"
)

LINK_ERRORS = (
    f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[0]})\n"
    "         Link 0: Replay Errors: 0\n"
    "         Link 0: Recovery Errors: 2\n"
    "         Link 0: CRC Errors: 40\n"
    "\n"
    "         Link 1: Replay Errors: 0\n"
    "         Link 1: Recovery Errors: N/A\n"
    "         Link 1: CRC Errors: 0\n"
)

LISTING = (
    f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[0]})\n"
    "  MIG 3g.40gb     Device  0: (UUID: MIG-36c795f2-5cf7-55d6-af30-e535e79b7bb6)\n"
    "  MIG 3g.40gb     Device  1: (UUID: MIG-3f45d38c-8cee-503e-b806-a1f1bdceedeb)\n"
    f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[1]})\n"
)

REPORT = """\

==============NVSMI LOG==============

Timestamp                                 : Sun Nov 15 10:00:00 2026
Driver Version                            : 580.95.05
CUDA Version                              : 13.0

Attached GPUs                             : 2
GPU 00000000:4F:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : N/A
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 1
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
        Bank Remap Availability Histogram
            Max                           : 2559 bank(s)
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 0
        Health
            Summary                       : Limited Capacity
            Bandwidth                     : Full
    Processes                             : None
GPU 00000000:52:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Remapped Rows                         : N/A
    Fabric
        State                             : In Progress
        Status                            : N/A
"""

QUERY_FIELDS = ("index", "name", "memory.total", "clocks_throttle_reasons.active", "power.draw", "mig.mode.current")
QUERY = """\
index, name, memory.total [MiB], clocks_event_reasons.active, power.draw [W], mig.mode.current
0, NVIDIA H100 80GB HBM3, 81559 MiB, 0x0000000000000004, 71.20 W, Disabled
1, NVIDIA GB10, [N/A], 0x0000000000000001, [N/A], [N/A]
"""

PROCESSES = f"""\
gpu_uuid, pid, used_gpu_memory [MiB], process_name
{UUIDS[0]}, 4242, 71234 MiB, /usr/bin/python3 serve.py --api-key=hunter2, and more
{UUIDS[0]}, 4243, [N/A], [Not Found]
{UUIDS[1]}, 9, 512 MiB, VLLM::Worker_TP1
"""
