"""Readers hand out slices of tensors by their Hugging Face names: from safetensors files, or made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.spec import ModelSpec, Scheme
from phalanx.spec.schemes import Role

Slices = tuple[slice, ...]
Pieces = dict[Role, Tensor]


class Reader(Protocol):
    def names(self) -> list[str]:
        """All tensors there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole tensor's shape; None where there is no such tensor."""
        ...

    def scheme_of(self, name: str) -> Scheme | None:
        """How a matrix is quantised here; None where `read` gives it as it is."""
        ...

    def read_pieces(self, name: str, slices: Slices, roles: Sequence[Role] = ()) -> Pieces:
        """Of a quantised matrix, all that its part is made of, or some of it, rows first; no other part is read."""
        ...

    def read(self, name: str, slices: Slices) -> Tensor:
        """A part of a tensor, in the dtype it is stored in; no other part is read."""
        ...

    def unknown(self) -> list[str]:
        """Tensors that belong to nothing in the model and are not among those it leaves alone."""
        ...

    def close(self) -> None: ...


class Unquantised:
    """What a reader is that has no quantised matrices."""

    def scheme_of(self, name: str) -> Scheme | None:
        return None

    def read_pieces(self, name: str, slices: Slices, roles: Sequence[Role] = ()) -> Pieces:
        raise LookupError(name)

    def unknown(self) -> list[str]:
        return []


class SafetensorsReader(Unquantised):
    """Slices from the safetensors files of a folder, memory-mapped: only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._holder: dict[str, Any] = {}
        for path in _safetensors_files(folder):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(
                    "broken_file", f"{path} cannot be read: {error}.", "Download the file again."
                ) from None
            self._holder |= dict.fromkeys(file.keys(), file)

    def names(self) -> list[str]:
        return list(self._holder)

    def shape(self, name: str) -> tuple[int, ...] | None:
        file = self._holder.get(name)
        return tuple(file.get_slice(name).get_shape()) if file is not None else None

    def dtype(self, name: str) -> str:
        """By the name that safetensors has for it."""
        return str(self._holder[name].get_slice(name).get_dtype())

    def read(self, name: str, slices: Slices) -> Tensor:
        return self._holder[name].get_slice(name)[slices]

    def close(self) -> None:
        self._files.close()


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in _files_in_index(index) if "/" not in name]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                "missing_file", f"{folder} lacks {', '.join(missing)}.", "Download the whole checkpoint."
            )
        return files
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {pickles[0]}, a pickle, which is never opened" if pickles else "none"
        raise CheckpointError(
            "no_weights",
            f"{folder} should hold *.safetensors; found {found}.",
            "Use the safetensors version of the model, or load_format='dummy' for random weights.",
        )
    return files


def _files_in_index(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no files")
        return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("broken_file", f"{index} is no index: {error!r}.", "Download the file again.") from None


class DummyReader(Unquantised):
    """Random weights of a sensible scale, for benchmarks. A name and a slice give the same values on every rank.

    With a head that drafts, what a token leads to is decided by the token alone, however its step is rounded: drafts
    that are known from steps of another length then come true.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._random = torch.Generator(device)

    def names(self) -> list[str]:
        return list(self._spec.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._spec.tensors.get(name)
        return tensor.shape if tensor else None

    def read(self, name: str, slices: Slices) -> Tensor:
        shape = [part.stop - part.start for part in slices]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._random.device)
        self._random.manual_seed(crc32(f"{name} {[part.start for part in slices]}".encode()))
        decides = self._spec.draft_head is not None and name.endswith("embed_tokens.weight")
        return torch.randn(shape, generator=self._random, device=self._random.device).mul_(64 if decides else 0.02)

    def close(self) -> None:
        return None
