"""GPU memory that several processes of one machine map (CUDA IPC), through the driver's own interface.

Torch's allocator hands out pieces of larger blocks, which cannot be shared one by one: this memory is not its own.
"""

from __future__ import annotations

import ctypes
from functools import cache

from phalanx.fabric.group import FabricError

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_P2P_ACCESS, _P2P_ATOMICS = 2, 3

_Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FabricError(f"the CUDA driver cannot be loaded: {error}") from None
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(_Address), ctypes.c_size_t]
    driver.cuMemFree_v2.argtypes = [_Address]
    driver.cuMemsetD8_v2.argtypes = [_Address, ctypes.c_ubyte, ctypes.c_size_t]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [_Address, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuMemcpyDtoHAsync_v2.argtypes = [ctypes.c_void_p, _Address, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), _Address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(_Address), _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [_Address]
    driver.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    driver.cuDeviceGetP2PAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), *[ctypes.c_int] * 3]
    _call(driver, "cuInit", ctypes.c_uint(0))
    return driver


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise FabricError(f"{name} failed with {status}: {(text.value or b'unknown').decode()}")


def allocate(size: int) -> int:
    """Zeroed memory on the current device."""
    address = _Address()
    _call(_driver(), "cuMemAlloc_v2", ctypes.byref(address), size)
    _call(_driver(), "cuMemsetD8_v2", address, 0, size)
    _call(_driver(), "cuCtxSynchronize")
    return address.value


def free(address: int) -> None:
    _call(_driver(), "cuMemFree_v2", address)


def copy_in(address: int, source: int, size: int, stream: int) -> None:
    """From pinned memory of the host, on a stream: a copy engine's work, which no kernel on the device holds up."""
    _call(_driver(), "cuMemcpyHtoDAsync_v2", address, source, size, stream)


def copy_out(target: int, address: int, size: int, stream: int) -> None:
    """The other way round."""
    _call(_driver(), "cuMemcpyDtoHAsync_v2", target, address, size, stream)


def handle_of(address: int) -> bytes:
    """By which another process opens memory from `allocate`."""
    handle = _Handle()
    _call(_driver(), "cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Where another process's memory is in the addresses of this one."""
    address = _Address()
    opened = _Handle.from_buffer_copy(handle)
    _call(_driver(), "cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _ENABLE_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    _call(_driver(), "cuIpcCloseMemHandle", address)


def linked(first: int, second: int) -> bool:
    """Whether a GPU reaches another's memory with atomics too, which NVLink has and PCIe lacks."""
    devices = [ctypes.c_int(), ctypes.c_int()]
    for device, index in zip(devices, (first, second), strict=True):
        _call(_driver(), "cuDeviceGet", ctypes.byref(device), index)
    found = ctypes.c_int()
    for attribute in (_P2P_ACCESS, _P2P_ATOMICS):
        _call(_driver(), "cuDeviceGetP2PAttribute", ctypes.byref(found), attribute, *devices)
        if not found.value:
            return False
    return True
