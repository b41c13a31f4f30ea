"""Seat: what runs for a rank on its own machine under Ray. It says what the machine is like, then runs the rank."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from phalanx.runtime import child, environment
from phalanx.runtime.channel import Keys
from phalanx.runtime.messages import Failure, RankAssignment
from phalanx.version import __version__

_WEIGHTS = ("*.safetensors", "*.json")


class SeatFacts(msgspec.Struct, frozen=True):
    """A machine as a rank finds it. `address` is that of the interface asked for, None if it has none.

    `files` holds the checkpoint's files with their sizes, and is empty where there is no such path; `gpus` is what
    CUDA_VISIBLE_DEVICES says.
    """

    versions: dict[str, str]
    address: str | None
    interfaces: list[str]
    files: dict[str, int]
    gpus: str
    public_key: str = ""


class Posting(msgspec.Struct, frozen=True):
    """A rank's assignment, less what only its own machine knows, and what the engine's environment adds."""

    assignment: RankAssignment
    variables: dict[str, str]


class Ended(msgspec.Struct, frozen=True):
    """How a rank ended."""

    status: int
    failure: Failure | None


def gather_facts(model_path: str, interface: str | None, ray_address: str, public_key: str = "") -> SeatFacts:
    """This machine's."""
    addresses = _addresses()
    return SeatFacts(
        versions={"phalanx": __version__, "python": platform.python_version(), "torch": _installed("torch")},
        address=ray_address if interface is None else addresses.get(interface),
        interfaces=sorted(addresses),
        files=_files(Path(model_path)),
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        public_key=public_key,
    )


def _addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    found = psutil.net_if_addrs().items()
    each = {name: [at.address for at in addresses if at.family == socket.AF_INET] for name, addresses in found}
    return {name: addresses[0] for name, addresses in each.items() if addresses}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _files(model: Path) -> dict[str, int]:
    if model.is_file():
        return {model.name: model.stat().st_size}
    return {path.name: path.stat().st_size for pattern in _WEIGHTS for path in model.glob(pattern)}


class Seat:
    """A Ray actor: it holds one bundle's resources for as long as it lives. Its keys never leave the machine."""

    def __init__(self) -> None:
        self._keys = Keys.make()

    def facts(self, model_path: str, interface: str | None, ray_address: str) -> bytes:
        return msgspec.json.encode(gather_facts(model_path, interface, ray_address, self._keys.public))

    def run(self, posting: bytes) -> bytes:
        """Run the rank in a process of its own until it ends; it does not outlive this one."""
        posted = msgspec.json.decode(posting, type=Posting)
        failure = Path(tempfile.gettempdir()) / f"phalanx-{secrets.token_hex(16)}.json"
        assignment = msgspec.structs.replace(posted.assignment, failure=str(failure), keys=self._keys)
        variables = child.with_phalanx(environment.of_rank(os.environ, posted.variables))
        process = child.start("phalanx.runtime.worker", msgspec.json.encode(assignment), variables)
        status = process.wait()
        report = None
        if failure.exists():
            report = msgspec.json.decode(failure.read_bytes(), type=Failure)
            failure.unlink()
        return msgspec.json.encode(Ended(status, report))
