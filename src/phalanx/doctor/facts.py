"""Facts: what a machine is, as it was found. Nothing here judges; `None` means that it could not be told."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

PathKind = Literal["self", "nvlink", "pix", "pxb", "phb", "node", "sys"]
"""How one GPU reaches another, best first: NVLink, one PCIe switch, several, the host bridge, a NUMA node, sockets."""
P2pStatus = Literal["ok", "chipset", "gpu", "topology", "disabled", "unsupported", "unknown"]
Throttle = Literal["power-cap", "hw-slowdown", "sw-thermal", "hw-thermal", "power-brake"]
FabricState = Literal["not-supported", "not-started", "in-progress", "completed"]
Health = Literal["healthy", "unhealthy", "limited"]


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """What all facts share: a file that holds a field nobody knows is refused, so that no misspelling passes unseen."""


class RemappedRows(Record, frozen=True):
    """Rows of memory that were replaced; `pending` waits for a reset, `failed` found no spare row."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class RetiredPages(Record, frozen=True):
    """Pages of memory that cards before Ampere took out of use; `pending` waits for a reset."""

    single_bit: int
    double_bit: int
    pending: bool


class NvLink(Record, frozen=True):
    """One link of a GPU. `gbs` is its speed one way; `errors` the replays, recoveries and CRC errors it counted."""

    link: int
    active: bool
    gbs: float | None = None
    errors: int | None = None


class Fabric(Record, frozen=True):
    """What the NVSwitch fabric says of a GPU."""

    state: FabricState
    status: str | None = None
    health: Health | None = None


class GpuProcess(Record, frozen=True):
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None


class GpuFacts(Record, frozen=True):
    """One GPU. Where `unified`, memory is the machine's: see `System.available_bytes`."""

    index: int
    name: str
    uuid: str | None = None
    bus_id: str | None = None
    capability: str | None = None
    unified: bool = False
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    mig: Literal["on", "off"] | None = None
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    remapped: RemappedRows | None = None
    temperature_c: int | None = None
    throttle: tuple[Throttle, ...] | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    persistence: bool | None = None
    numa_node: int | None = None
    """The node of the CPU that it hangs on."""
    links: tuple[NvLink, ...] | None = None
    """Empty: it has no NVLink, or none of its links is active and the driver lists none."""
    fabric: Fabric | None = None
    retired: RetiredPages | None = None
    vbios: str | None = None


class GpuPath(Record, frozen=True):
    """Between two GPUs, by index: the path, how many NVLinks it has, and whether peer access is allowed."""

    a: int
    b: int
    kind: PathKind
    links: int = 0
    p2p: P2pStatus | None = None


class FabricManager(Record, frozen=True):
    """The service that older NVSwitch boxes need, and whether there are switches at all."""

    running: bool | None = None
    version: str | None = None
    switches: int | None = None
    problem: str | None = None
    switch_firmware: tuple[str, ...] = ()


class Software(Record, frozen=True):
    """Versions. `nccl` is what torch loads, `system_nccl` a library that lies beside it. `engines` are other engines,
    and what they run on where another environment was named.
    """

    python: str
    phalanx: str
    driver: str | None = None
    driver_cuda: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_sees_gpus: int | None = None
    nccl: str | None = None
    system_nccl: str | None = None
    triton: str | None = None
    ray: str | None = None
    engines: dict[str, str] = {}


class Disk(Record, frozen=True):
    """Room where weights are kept."""

    path: str
    free_bytes: int


class System(Record, frozen=True):
    """The host. Limits are bytes or counts; `memlock_bytes` is -1 where it is unlimited."""

    hostname: str
    product: str | None = None
    os: str | None = None
    kernel: str | None = None
    architecture: str | None = None
    cpu: str | None = None
    cores: int | None = None
    """Cores, not threads."""
    instructions: tuple[str, ...] = ()
    numa_nodes: int | None = None
    memory_bytes: int | None = None
    """Of the machine, or of the container where that may use less; `available_bytes` likewise."""
    available_bytes: int | None = None
    swap_bytes: int | None = None
    swap_used_bytes: int | None = None
    swappiness: int | None = None
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    nofile: int | None = None
    hugepages: int | None = None
    transparent_hugepages: str | None = None
    iommu: bool | None = None
    """It translates what devices read and write; false where it is off or passes through."""
    gui: bool | None = None
    container: bool | None = None
    xids: tuple[int, ...] | None = None
    disk: Disk | None = None


class Nic(Record, frozen=True):
    """A network interface; `rdma` is its RoCE or InfiniBand device."""

    name: str
    up: bool
    speed_mbps: int | None = None
    mtu: int | None = None
    addresses: tuple[str, ...] = ()
    """With prefix length: 192.168.100.1/24."""
    rdma: str | None = None
    rdma_mtu: int | None = None
    firmware: str | None = None


class NetworkFacts(Record, frozen=True):
    """Interfaces, and the variables by which NCCL, gloo and Ray choose one."""

    nics: tuple[Nic, ...] = ()
    environment: dict[str, str] = {}
    jumbo_to: dict[str, bool] = {}
    """Peers that were tried with frames of 9000 bytes, and whether those came through whole."""


class Rate(Record, frozen=True):
    """What one device was measured to do, beside what its datasheet says."""

    gpu: int
    """-1 is the CPU."""
    device: str
    copy_gbs: float
    matmul_tflops: float
    matmul_format: str = "bf16"
    datasheet_gbs: float | None = None
    datasheet_tflops: float | None = None
    fp8_tflops: float | None = None
    """Where the device multiplies in FP8, beside `matmul_format`."""
    datasheet_fp8_tflops: float | None = None


class AllReduce(Record, frozen=True):
    """An all-reduce of `size` bytes over `ranks`: as measured, and as the cost model has it."""

    size: int
    ranks: int
    microseconds: float
    bus_gbs: float
    modelled_microseconds: float | None = None


class Corruption(Record, frozen=True):
    """A rank whose sum of random numbers differs from the others'."""

    rank: int
    size: int
    round: int


class Measured(Record, frozen=True):
    """What `--measure` found. `backend` is how the ranks talked."""

    rates: tuple[Rate, ...] = ()
    backend: Literal["nccl", "gloo"] | None = None
    all_reduces: tuple[AllReduce, ...] = ()
    checked_bytes: int = 0
    corruptions: tuple[Corruption, ...] = ()
    problem: str | None = None


class Watched(Record, frozen=True):
    """A GPU over some time: percent of it at work, and the share of samples in which each reason held clocks down."""

    gpu: int
    seconds: float
    utilisation: float
    throttle: dict[str, float] = {}


class Serving(Record, frozen=True):
    """A server that runs on this machine: what it says of itself."""

    model: str
    tp: int
    concurrency: float
    tokens_per_s: float
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    deaths: tuple[str, ...] = ()
    """Codes of the errors its engine died of, such as rank_stuck."""


class Facts(Record, frozen=True):
    """One machine at one time. `unread` says what could not be read, and why."""

    recorded_at: str
    """ISO 8601, UTC."""
    system: System
    software: Software
    gpus: tuple[GpuFacts, ...] = ()
    paths: tuple[GpuPath, ...] = ()
    fabric_manager: FabricManager | None = None
    network: NetworkFacts = NetworkFacts()
    measured: Measured | None = None
    serving: Serving | None = None
    unread: tuple[str, ...] = ()
    version: int = 1
    lost_gpus: tuple[int, ...] = ()
    """Indices of GPUs that the driver counts but cannot open. They are not in `gpus`."""
    watched: tuple[Watched, ...] = ()
