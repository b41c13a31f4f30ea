"""A stand-in for the module pynvml: recorded answers by call, and recorded errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, NO_FUNCTION, LOST, OTHER_VERSION = 3, 4, 12, 13, 15, 25
UNSIGNED_INT = 1
MIB = 2**20


@dataclass(frozen=True)
class Fails:
    """An answer that is an error."""

    code: int


@dataclass(frozen=True)
class FakeLink:
    """To a switch, or to the GPU of this index. `fields` are values by NVML's field numbers."""

    state: int = 1
    to: int | None = None
    fields: dict[int, int] = field(default_factory=dict)
    counters: tuple[int, ...] | None = None


@dataclass
class FakeGpu:
    """Answers by the call's name without `nvmlDeviceGet`; what is not recorded is not supported."""

    answers: dict[str, Any]
    links: list[FakeLink] = field(default_factory=list)
    fabric: tuple[int, int, int] | Fails = Fails(NOT_SUPPORTED)
    """State, status, health."""


class FakeNvml:
    """The binding's own constants, structures and errors, with our machine behind them."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = 36
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    c_nvmlGpuFabricInfo_v3_t = pynvml.c_nvmlGpuFabricInfo_v3_t
    c_nvmlGpuFabricInfo_v2_t = pynvml.c_nvmlGpuFabricInfo_v2_t

    def __init__(
        self,
        gpus: list[FakeGpu | Fails],
        ancestors: Callable[[int, int], int | Fails] = lambda a, b: 50,
        peers: Callable[[int, int], int | Fails] = lambda a, b: 0,
        system: dict[str, Any] | None = None,
    ) -> None:
        self.gpus, self.ancestors, self.peers = gpus, ancestors, peers
        self.system = {"DriverVersion": "580.95.05", "CudaDriverVersion_v2": 13000} | (system or {})
        self.shut_down = False

    def nvmlInit(self) -> None:
        _answer(self.system.get("Init"))

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlSystemGetDriverVersion(self) -> Any:
        return _answer(self.system["DriverVersion"])

    def nvmlSystemGetCudaDriverVersion_v2(self) -> Any:
        return _answer(self.system["CudaDriverVersion_v2"])

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        return _answer(self.system.get(f"ProcessName {pid}", Fails(6)))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        _answer(self.gpus[index])
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: int | None = None) -> Any:
        return _answer(self._gpu(gpu).answers.get("MemoryInfo" if version else "MemoryInfo_v1", Fails(NOT_SUPPORTED)))

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        links = self._gpu(gpu).links
        return links[link].state if link < len(links) else _answer(Fails(NOT_SUPPORTED))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if self._gpu(gpu).links[link].to is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        to = self._gpu(gpu).links[link].to
        return pci(200) if to is None else self._gpu(to).answers["PciInfo"]

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: int, link: int, counter: int) -> int:
        counters = self._gpu(gpu).links[link].counters
        return _answer(Fails(NOT_SUPPORTED)) if counters is None else counters[counter]

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[tuple[int, int]]) -> list[Any]:
        values = [self._gpu(gpu).links[link].fields.get(number) for number, link in fields]
        return [
            SimpleNamespace(nvmlReturn=NOT_SUPPORTED)
            if value is None
            else SimpleNamespace(nvmlReturn=0, valueType=UNSIGNED_INT, value=SimpleNamespace(uiVal=value, ullVal=-1))
            for value in values
        ]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> Any:
        return _answer(self.ancestors(one, other))

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> Any:
        assert index == 0, "the binding's own constant is a tuple, which ctypes refuses"
        return _answer(self.peers(one, other))

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: int, reference: Any) -> int:
        info, fabric = reference._obj, self._gpu(gpu).fabric
        oldest = self.system.get("oldest_fabric_only") and isinstance(info, self.c_nvmlGpuFabricInfo_v3_t)
        info.state, info.status, health = _answer(Fails(OTHER_VERSION) if oldest else fabric)
        if hasattr(info, "healthSummary"):
            info.healthSummary = health
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        call = name.removeprefix("nvmlDeviceGet")
        return lambda gpu, *arguments: _answer(self._gpu(gpu).answers.get(call, Fails(NOT_SUPPORTED)))

    def _gpu(self, gpu: int) -> FakeGpu:
        found = self.gpus[gpu]
        assert isinstance(found, FakeGpu)
        return found


def _answer(recorded: Any) -> Any:
    if isinstance(recorded, Fails):
        raise pynvml.NVMLError(recorded.code)
    return recorded


def pci(bus: int, domain: int = 0) -> Any:
    return SimpleNamespace(domain=domain, bus=bus, device=0, busId=f"{domain:08X}:{bus:02X}:00.0".encode())


def memory(total_mib: int, used_mib: int) -> Any:
    return SimpleNamespace(total=total_mib * MIB, used=used_mib * MIB)


HGX_LINK = FakeLink(fields={164: 26562, 161: 0, 162: 0, 163: 0})


def hgx_gpu(index: int, links: list[FakeLink] | None = None, **changes: Any) -> FakeGpu:
    """One of the eight of an HGX H100."""
    answers = {
        "Name": "NVIDIA H100 80GB HBM3",
        "UUID": f"GPU-{index}",
        "PciInfo": pci(0x18 + index),
        "CudaComputeCapability": (9, 0),
        "MemoryInfo": memory(81559, 4),
        "MigMode": (0, 0),
        "EccMode": (1, 1),
        "TotalEccErrors": 0,
        "RemappedRows": (0, 0, 0, 0),
        "Temperature": 31,
        "CurrentClocksEventReasons": 1,
        "PowerUsage": 71_205,
        "PowerManagementLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "PersistenceMode": 1,
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
    }
    return FakeGpu(answers | changes, [HGX_LINK] * 18 if links is None else links, (3, 0, 1))


def hgx() -> FakeNvml:
    return FakeNvml([hgx_gpu(index) for index in range(8)])


def pair_of_3090(bridged: bool) -> FakeNvml:
    """GeForce cards: no ECC, no MIG, no fabric, and peer access only over the bridge."""
    gpus: list[FakeGpu | Fails] = []
    for index in range(2):
        answers = {
            "Name": b"NVIDIA GeForce RTX 3090",
            "UUID": b"GPU-%d" % index,
            "PciInfo": pci(1 + index),
            "CudaComputeCapability": (8, 6),
            "MemoryInfo": Fails(NO_FUNCTION),
            "MemoryInfo_v1": memory(24576, 512),
            "Temperature": 45,
            "CurrentClocksEventReasons": Fails(NO_FUNCTION),
            "CurrentClocksThrottleReasons": 0x44,
            "PowerUsage": 25_000,
            "PowerManagementLimit": 280_000,
            "PowerManagementDefaultLimit": 350_000,
            "CurrPcieLinkWidth": 8,
            "MaxPcieLinkWidth": 16,
            "PersistenceMode": 0,
            "ComputeRunningProcesses": [SimpleNamespace(pid=77, usedGpuMemory=300 * MIB)],
            "GraphicsRunningProcesses": [
                SimpleNamespace(pid=77, usedGpuMemory=300 * MIB),
                SimpleNamespace(pid=78, usedGpuMemory=None),
            ],
        }
        link = FakeLink(1, to=1 - index, fields={90: 14062}, counters=(1, 0, 2, 0)) if bridged else FakeLink(0)
        gpus.append(FakeGpu(answers, [link] * 4))
    return FakeNvml(
        gpus,
        ancestors=lambda a, b: 30,
        peers=lambda a, b: 0 if bridged else 1,
        system={"ProcessName 77": "/usr/bin/python3 train.py --token=x"},
    )


def spark() -> FakeNvml:
    """GB10: this driver answers for memory, and wrongly."""
    answers = {
        "Name": "NVIDIA GB10",
        "UUID": "GPU-gb10",
        "PciInfo": pci(1, domain=0xF),
        "CudaComputeCapability": (12, 1),
        "MemoryInfo": memory(122570, 90000),
        "MemoryInfo_v1": memory(122570, 90000),
        "Temperature": 41,
        "CurrentClocksEventReasons": 1,
        "PowerUsage": 11_170,
        "CurrPcieLinkWidth": 1,
        "MaxPcieLinkWidth": 1,
        "PersistenceMode": 1,
        "ComputeRunningProcesses": [SimpleNamespace(pid=5, usedGpuMemory=40000 * MIB)],
        "GraphicsRunningProcesses": Fails(NOT_SUPPORTED),
    }
    return FakeNvml([FakeGpu(answers)])
