"""Versions, without importing what they are of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.doctor.gather import software
from phalanx.doctor.gather.host import CommandError
from phalanx.doctor.gather.software import driver_of_kernel, read_software, system_nccl, torch_cuda
from tests.doctor.gather.recorded import SPARK_FILES, recorded_host


def test_versions_are_those_that_the_packages_say_of_themselves(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = read_software(recorded_host(tmp_path), None, None, gpus=0)
    assert found.torch == torch.__version__
    assert found.torch_cuda == torch.version.cuda
    assert found.torch_sees_gpus is None, "no GPUs: torch is not started"
    assert found.python == sys.version.split()[0]


def test_gathering_imports_no_torch() -> None:
    code = "import sys; from phalanx.doctor.gather import gather; gather(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("__version__ = '1'\n", None),
        ("cuda = open('x')\n", None),
        ("cuda = 12\n", None),
        ("def (\n", None),
    ],
)
def test_torchs_cuda_from_its_version_file(text: str, cuda: str | None) -> None:
    assert torch_cuda(text) == cuda


def test_the_driver_of_the_loaded_kernel_module(tmp_path: Path) -> None:
    assert driver_of_kernel(recorded_host(tmp_path, SPARK_FILES)) == "580.142"
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024\n"
    assert driver_of_kernel(recorded_host(tmp_path, {"/proc/driver/nvidia/version": old})) == "535.161.08"
    assert driver_of_kernel(recorded_host(tmp_path / "none")) is None
    told = read_software(recorded_host(tmp_path), "570.1", "12.8", gpus=0)
    assert (told.driver, told.driver_cuda) == ("570.1", "12.8"), "what the driver says itself comes first"


def test_the_systems_nccl_by_its_files_name(tmp_path: Path) -> None:
    folder = "/usr/lib/aarch64-linux-gnu"
    host = recorded_host(tmp_path, {f"{folder}/libnccl.so.2.28.9": "binary"})
    (tmp_path / folder.lstrip("/") / "libnccl.so.2").symlink_to("libnccl.so.2.28.9")
    assert system_nccl(host) == "2.28.9"
    assert system_nccl(recorded_host(tmp_path / "none")) is None


def test_the_systems_nccl_by_what_it_says_of_itself(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, {"/usr/lib64/libnccl.so.2": "\x7fELF...NCCL version 2.27.3+cuda13.0..."})
    assert system_nccl(host) == "2.27.3"
    elsewhere = recorded_host(tmp_path, {"/opt/nccl/libnccl.so.2.30.1": ""}, environ={"LD_LIBRARY_PATH": ":/opt/nccl"})
    assert system_nccl(elsewhere) == "2.30.1", "LD_LIBRARY_PATH comes first"
    empty = recorded_host(tmp_path / "empty", {"/usr/lib64/libnccl.so.2": ""})
    assert system_nccl(empty) is None


@pytest.mark.parametrize(
    ("said", "gpus", "nccl"),
    [
        ("8\n2.28.9\n", 8, "2.28.9"),
        ("0\n\n", 0, None),
        ("warning\n", None, None),
        (CommandError("python3 ended with -11"), None, None),
    ],
)
def test_what_torch_says_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | CommandError, gpus: int | None, nccl: str | None
) -> None:
    monkeypatch.setattr(software, "_torch_cuda", lambda folder: "13.0")
    monkeypatch.setattr(software, "_torch_nccl", lambda folder, cuda: None)
    host = recorded_host(tmp_path, commands={sys.executable: said})
    found = read_software(host, None, None, gpus=8)
    assert (found.torch_sees_gpus, found.nccl) == (gpus, nccl)
    if isinstance(said, CommandError):
        assert host.unread == ["Torch cannot tell how many GPUs it sees: python3 ended with -11"]


def test_torch_itself_answers_as_it_is_asked() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", software._ASK_TORCH], capture_output=True, text=True, check=True)
    assert software._TORCH_ANSWER.fullmatch(done.stdout)
