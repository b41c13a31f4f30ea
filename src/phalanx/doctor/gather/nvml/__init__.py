"""The GPUs as NVML tells them, by NVIDIA's own Python binding."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Thread
from typing import Any

from phalanx.doctor.facts import Fabric, FabricState, GpuFacts, GpuProcess, Health, RemappedRows, Throttle
from phalanx.doctor.gather.found import FoundGpus, has_unified_memory
from phalanx.doctor.gather.nvml.device import LOST, Device, as_text
from phalanx.doctor.gather.nvml.links import LinkEnd, Station, address_of, read_links, read_paths
from phalanx.doctor.gather.smi.query import program_name, throttles_of
from phalanx.errors import PhalanxError

_SECONDS = 60.0
_MIB = 2**20
_UNCORRECTED, _SINCE_BOOT = 1, 0
_TEMPERATURE_OF_GPU = 0
_STATES: dict[int, FabricState] = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
_HEALTHS: dict[int, Health] = {1: "healthy", 2: "unhealthy", 3: "limited"}


class NvmlError(PhalanxError):
    """NVML cannot be asked at all."""

    def __init__(self, reason: str) -> None:
        super().__init__("no_nvml", f"NVML cannot be asked: {reason.rstrip('.')}.", "")


def read_nvml(unread: list[str], nvml: Any = None, seconds: float = _SECONDS) -> FoundGpus:
    """All that NVML tells. A driver that hangs, as one may after a GPU fell off its bus, is given up on."""
    found: list[FoundGpus] = []
    failures: list[NvmlError] = []
    sentences: list[str] = []

    def read() -> None:
        try:
            found.append(_read(nvml or binding(), sentences))
        except NvmlError as error:
            failures.append(error)
        except Exception as error:  # whatever the binding makes of a driver it does not know
            failures.append(NvmlError(f"it failed with {error!r}"))

    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not found:
        raise NvmlError(f"it did not answer within {seconds:g} s")
    unread.extend(sentences)
    return found[0]


def binding() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlError("the package nvidia-ml-py is not installed") from None
    return pynvml


def _read(nvml: Any, unread: list[str]) -> FoundGpus:
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from None
    try:
        return _read_all(nvml, count, unread)
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _read_all(nvml: Any, count: int, unread: list[str]) -> FoundGpus:
    gpus: list[GpuFacts] = []
    lost: list[int] = []
    stations: dict[int, Station] = {}
    for index in range(count):
        try:
            device = Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            unread.append(f"GPU {index} cannot be opened: {str(error).rstrip('.')}.")
            lost.append(index)
            continue
        pci = device.ask("its bus address", "nvmlDeviceGetPciInfo")
        ends = read_links(device)
        gpu = _read_gpu(index, device, pci, ends)
        unread.extend(device.sentences(f"GPU {index}"))
        if gpu is None:
            lost.append(index)
        else:
            gpus.append(gpu)
            stations[index] = Station(device, address_of(pci), ends)
    driver = Device(nvml)
    paths = read_paths(stations, driver)
    cuda = driver.ask("the CUDA version", "nvmlSystemGetCudaDriverVersion_v2")
    version = as_text(driver.ask("the driver's version", "nvmlSystemGetDriverVersion"))
    unread.extend(driver.sentences("The driver"))
    spelled = f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else None
    return FoundGpus(tuple(gpus), tuple(lost), paths, version, spelled)


def _read_gpu(index: int, device: Device, pci: Any, ends: tuple[LinkEnd, ...] | None) -> GpuFacts | None:
    """The GPU, or nothing where the driver has lost it."""
    name = as_text(device.ask("its name", "nvmlDeviceGetName"))
    if name is None:
        return None
    capability = device.ask("its compute capability", "nvmlDeviceGetCudaComputeCapability")
    unified = has_unified_memory(name)
    total, used = (None, None) if unified else memory_of(device)
    mig = device.ask("MIG mode", "nvmlDeviceGetMigMode")
    ecc = device.ask("ECC mode", "nvmlDeviceGetEccMode")
    rows = device.ask("remapped rows", "nvmlDeviceGetRemappedRows")
    persistence = device.ask("persistence mode", "nvmlDeviceGetPersistenceMode")
    gpu = GpuFacts(
        index=index,
        name=name,
        uuid=as_text(device.ask("its UUID", "nvmlDeviceGetUUID")),
        bus_id=as_text(getattr(pci, "busId", None)),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        unified=unified,
        memory_total_mib=total,
        memory_used_mib=used,
        processes=_processes(device),
        mig=None if mig is None else "on" if mig[0] else "off",
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected_errors=device.ask("ECC errors", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_BOOT),
        remapped=None if rows is None else RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3])),
        temperature_c=device.ask("its temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
        throttle=throttle_of(device),
        power_w=watts_of(device.ask("power", "nvmlDeviceGetPowerUsage")),
        power_limit_w=watts_of(device.ask("power limit", "nvmlDeviceGetPowerManagementLimit")),
        power_default_w=watts_of(device.ask("default power limit", "nvmlDeviceGetPowerManagementDefaultLimit")),
        pcie_width=device.ask("PCIe width", "nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=device.ask("PCIe width", "nvmlDeviceGetMaxPcieLinkWidth"),
        persistence=None if persistence is None else bool(persistence),
        links=None if ends is None else tuple(end.link for end in ends),
        fabric=_fabric(device),
        vbios=as_text(device.ask("its VBIOS", "nvmlDeviceGetVbiosVersion")),
    )
    return None if LOST in device.codes else gpu


def memory_of(device: Device) -> tuple[int | None, int | None]:
    """MiB in all and in use, the driver's own share left out where it tells it apart, as nvidia-smi does."""
    version = getattr(device.nvml, "nvmlMemory_v2", None)
    memory = version and device.ask("memory", "nvmlDeviceGetMemoryInfo", version)
    memory = memory or device.ask("memory", "nvmlDeviceGetMemoryInfo")
    return (None, None) if memory is None else (memory.total // _MIB, memory.used // _MIB)


def _processes(device: Device) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for kind in ("Compute", "Graphics"):
        for process in device.ask("processes", f"nvmlDeviceGet{kind}RunningProcesses") or ():
            memory = process.usedGpuMemory
            name = program_name(_process_name(device.nvml, process.pid))
            found.setdefault(process.pid, GpuProcess(process.pid, name, None if memory is None else memory // _MIB))
    return tuple(found.values())


def _process_name(nvml: Any, pid: int) -> str | None:
    """Processes end, and those of other containers have no name here: neither is worth a word."""
    try:
        return as_text(nvml.nvmlSystemGetProcessName(pid))
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def throttle_of(device: Device) -> tuple[Throttle, ...] | None:
    bits = device.ask("throttle reasons", "nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = device.ask("throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    return None if bits is None else throttles_of(bits)


def watts_of(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _fabric(device: Device) -> Fabric | None:
    """By the newest form of the question that the driver knows."""
    for version in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        kind = getattr(device.nvml, version, None)
        if kind is None:
            continue
        info = kind()
        if device.ask("its fabric", "nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is not None:
            state = _STATES.get(info.state)
            if state is None:
                return None
            status = None if state == "not-supported" else _status(device.nvml, info.status)
            return Fabric(state, status, _HEALTHS.get(getattr(info, "healthSummary", 0)))
    return None


def _status(nvml: Any, code: int) -> str:
    return "Success" if code == 0 else str(nvml.NVMLError(code))
