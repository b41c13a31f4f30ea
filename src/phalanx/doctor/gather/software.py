"""Versions of the software that has to fit together. Packages are asked by their metadata: importing torch is slow."""

from __future__ import annotations

import ast
import mmap
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from phalanx.doctor.facts import Software
from phalanx.doctor.gather.host import CommandError, Host
from phalanx.errors import ConfigError
from phalanx.version import __version__

_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nccl/lib",
)
_KERNEL_MODULE = re.compile(r"NVRM version:.*?Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")
_NCCL_WORDS = re.compile(rb"NCCL version (\d{1,2}\.\d{1,2}\.\d{1,3})")
_ASK_TORCH = """
import torch
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
print(*torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else (), sep=".")
"""
_TORCH_ANSWER = re.compile(r"(\d{1,3})\n(\d+\.\d+\.\d+)?\n?")
_TORCH_SECONDS = 120.0
_ENGINES = ("vllm", "sglang", "tensorrt_llm")


def read_software(
    host: Host, driver: str | None, driver_cuda: str | None, gpus: int, venv: Path | None = None
) -> Software:
    """`driver` and `driver_cuda` as the driver told them. Torch is started only where there are GPUs for it to see.
    `venv`: another environment whose engines are meant.
    """
    torch = _torch_folder()
    cuda = _torch_cuda(torch)
    sees, loads = _ask_torch(host) if cuda and gpus else (None, None)
    return Software(
        python=platform.python_version(),
        phalanx=__version__,
        driver=driver or driver_of_kernel(host),
        driver_cuda=driver_cuda,
        torch=_version("torch"),
        torch_cuda=cuda,
        torch_sees_gpus=sees,
        nccl=loads or _torch_nccl(torch, cuda),
        system_nccl=system_nccl(host),
        triton=_version("triton"),
        ray=_version("ray"),
        engines=engine_versions(venv),
    )


def engine_versions(venv: Path | None = None) -> dict[str, str]:
    """Engines and what they run on, by the metadata of this environment or of a virtual one; nothing is imported."""
    if venv is None:
        return {name: installed for name in _ENGINES if (installed := _version(name))}
    folders = [str(each) for each in sorted(venv.glob("lib*/python3*/site-packages"))]
    if not folders:
        raise ConfigError(
            "no_venv", f"{venv} has no lib/python3*/site-packages.", "Name a virtual environment's folder."
        )
    found = {str(each.metadata["Name"]).lower().replace("-", "_"): each.version for each in distributions(path=folders)}
    engines = {name: found[name] for name in _ENGINES if name in found}
    if not engines:
        return {}
    beside = {"torch": found.get("torch"), "ray": found.get("ray")}
    beside["nccl"] = found.get("nvidia_nccl_cu13") or found.get("nvidia_nccl_cu12")
    beside["cuda"] = next((torch_cuda(text) for text in map(_torch_version_file, folders) if text), None)
    return engines | {name: told for name, told in beside.items() if told}


def _torch_version_file(site: str) -> str | None:
    try:
        return (Path(site) / "torch" / "version.py").read_text()
    except (OSError, UnicodeDecodeError):
        return None


def driver_of_kernel(host: Host) -> str | None:
    """The version of the kernel module that is loaded."""
    match = _KERNEL_MODULE.search(host.text("/proc/driver/nvidia/version") or "")
    return match[1] if match else None


def system_nccl(host: Host) -> str | None:
    """The NCCL that a program without its own would load: by LD_LIBRARY_PATH, else among the system's libraries."""
    folders = [*filter(None, host.environ.get("LD_LIBRARY_PATH", "").split(":")), *_LIBRARY_FOLDERS]
    return next((found for folder in folders if (found := _nccl_in(host.path(folder)))), None)


def torch_cuda(version_file: str) -> str | None:
    """The CUDA that torch was built for, from the text of its version.py; `None` for a CPU build or a strange file."""
    try:
        tree = ast.parse(version_file)
    except (SyntaxError, ValueError):
        return None
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign):
            target: ast.expr = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        else:
            continue
        if isinstance(target, ast.Name) and target.id == "cuda":
            found = statement.value.value if isinstance(statement.value, ast.Constant) else None
            return found if isinstance(found, str) else None
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_folder() -> Path | None:
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _torch_cuda(folder: Path | None) -> str | None:
    if folder is None:
        return None
    try:
        return torch_cuda((folder / "version.py").read_text())
    except (OSError, UnicodeDecodeError):
        return None


def _torch_nccl(folder: Path | None, cuda: str | None) -> str | None:
    """NCCL as torch's wheels bring it, or as it lies in torch's own folder."""
    if folder is None or cuda is None:
        return None
    return _version(f"nvidia-nccl-cu{cuda.partition('.')[0]}") or _nccl_in(folder / "lib")


def _nccl_in(folder: Path) -> str | None:
    """The version of the newest libnccl in a folder."""
    try:
        libraries = sorted(folder.glob("libnccl.so*"), reverse=True)
        for library in libraries:
            if named := _NCCL_FILE.fullmatch(library.resolve().name):
                return named[1]
        for library in libraries:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if said := _NCCL_WORDS.search(content):
                    return said[1].decode()
    except (OSError, ValueError):
        return None
    return None


def _ask_torch(host: Host) -> tuple[int | None, str | None]:
    """GPUs that torch can use and the NCCL it loads, from a process of its own: a driver in trouble may end it."""
    try:
        said = host.command(sys.executable, "-c", _ASK_TORCH, seconds=_TORCH_SECONDS)
    except CommandError as error:
        host.unread.append(f"Torch cannot tell how many GPUs it sees: {error.found}")
        return None, None
    answer = _TORCH_ANSWER.fullmatch(said)
    return (int(answer[1]), answer[2]) if answer else (None, None)
