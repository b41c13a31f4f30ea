"""Quantize: a checkpoint's linear layers brought to FP8 or four bits, in a form that others load too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError
from phalanx.kernels.fp8 import GROUP
from phalanx.quant import at_work
from phalanx.spec import Layout, ModelSpec, Scheme
from phalanx.weights.balance import Factors, Inputs, balanced
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import Progress, check_tensors
from phalanx.weights.reader import Pieces, SafetensorsReader
from phalanx.weights.rewriting import Rewritten, check_whole, rewritten
from phalanx.weights.targets import Target, target_of
from phalanx.weights.views import ViewReader

REPORT_FILE = "quantization_report.json"
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "[0-9]*_*/config.json")
"""The last one is of modules that sentence-transformers put behind a model."""
_NOT_COPIED = ("config.json", "model.safetensors.index.json", REPORT_FILE)
_SHARD_BYTES = 4 * 2**30


class TensorError(NamedTuple):
    """How far a matrix is from what it was: the norm of the difference over its own norm, and the largest change."""

    name: str
    relative: float
    largest: float


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """What was written, and what it cost in precision. `uneven` matrices have a side that 128 does not divide."""

    number_format: str
    bytes_before: int
    bytes_after: int
    errors: tuple[TensorError, ...]
    uneven: tuple[str, ...]

    def layers(self) -> list[tuple[str, float, TensorError]]:
        """By layer: its mean relative error, and its worst matrix."""
        groups: dict[str, list[TensorError]] = {}
        for error in self.errors:
            groups.setdefault(_layer_of(error.name), []).append(error)
        return [
            (layer, sum(error.relative for error in group) / len(group), max(group, key=lambda error: error.relative))
            for layer, group in groups.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.number_format,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": [
                {"layer": layer, "mean_relative_error": mean, "worst": worst._asdict()}
                for layer, mean, worst in self.layers()
            ],
            "tensors": [error._asdict() for error in self.errors],
            "not_divided_by_128": list(self.uneven),
        }


def _layer_of(name: str) -> str:
    """`model.layers.7.mlp.up_proj.weight` is of `model.layers.7`."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else parts[0]


def quantize(
    source: Path, output: Path, number_format: str, progress: Progress, inputs: Inputs | None = None
) -> QuantizedCheckpoint:
    """Write the checkpoint anew into `output`, a few GB in memory at a time. It appears when it is whole.

    `inputs` are rows that linear layers are given, for formats that go by them.
    """
    spec = _readable(source)
    with closing(ViewReader(SafetensorsReader(source), spec)) as reader:
        check_tensors(Layout(spec, 1), reader)
        tensors = rewritten(spec, reader)
        target = target_of(number_format, spec, _skipped(tensors, reader))
        check_whole(tensors, target.scheme)
        factors = balanced(spec, reader, inputs, target.scheme.group or GROUP) if target.calibrated and inputs else {}
        with _appearing(new_folder(output)) as folder:
            report = _write(tensors, reader, target, number_format, folder, progress, factors)
            _write_config(source, folder, target)
            (folder / REPORT_FILE).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    return report


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder to write into, which is `output` once all went well, and gone if not."""
    unfinished = output.with_name(f".{output.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "output_unwritable", f"{output} cannot be written: {error.strerror}.", "Name another folder with --output."
        ) from error
    try:
        yield unfinished
        _put(unfinished, output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _put(folder: Path, output: Path) -> None:
    """In the place of nothing, or into an empty folder, which may be where somebody is, or on another disk."""
    if not output.exists():
        folder.rename(output)
        return
    for path in folder.iterdir():
        shutil.move(path, output / path.name)
    folder.rmdir()


def new_folder(output: Path) -> Path:
    """Where it is, if it is not there yet or empty."""
    output = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError("output_exists", f"{output} is there already.", "Name a new folder with --output.")
    return output


def _readable(source: Path) -> ModelSpec:
    checkpoint = Checkpoint(source)
    if checkpoint.is_gguf:
        raise CheckpointError(
            "not_safetensors", f"{source} is a GGUF file.", "Name the model's safetensors folder: GGUF is quantised."
        )
    if checkpoint.spec.quantization is not None:
        raise CheckpointError(
            "already_quantised",
            f"{source} is quantised already, as {checkpoint.spec.number_format}.",
            "Name the bf16 version of the model: quantising twice only loses precision.",
        )
    return checkpoint.spec


class _Shards:
    """Files of a few GB each; they get their final names once it is known how many there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._files: list[list[str]] = []
        self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._open and self._open_bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._open[name] = tensor.contiguous()
        self._open_bytes += tensor.nbytes
        self.bytes += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._open, self._folder / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._files.append(list(self._open))
        self._open, self._open_bytes = {}, 0

    def close(self) -> None:
        self._flush()
        places: dict[str, str] = {}
        for number, names in enumerate(self._files):
            name = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            (self._folder / f"{number}.safetensors").rename(self._folder / name)
            places |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _write(
    tensors: list[Rewritten],
    reader: ViewReader,
    target: Target,
    number_format: str,
    folder: Path,
    progress: Progress,
    factors: dict[str, Factors],
) -> QuantizedCheckpoint:
    shards, errors, uneven, before = _Shards(folder), [], [], 0
    for done, tensor in enumerate(tensors, start=1):
        name, values = tensor.name, tensor.read(reader)
        before += values.nbytes
        if tensor.parts and not values.isfinite().all():
            raise CheckpointError(
                "bad_values", f"{name} has numbers that are not finite.", "The file seems damaged: download it again."
            )
        change = tensor.change(factors)
        if tensor.is_linear:
            pieces = target.quantise(change.apply(values))
            for piece in target.scheme.pieces:
                stored = pieces[piece.role]
                shards.add(piece.name(name), stored.t() if piece.transposed else stored)
            if target.shaped:
                shards.add(f"{name}_shape", torch.tensor(values.shape))
            errors.append(_error(name, values, pieces, change, target.scheme))
            if number_format == "fp8-block" and any(size % GROUP for size in values.shape):
                uneven.append(name)
        else:
            shards.add(name, change.apply(values, tensor.plus))
        progress(done, len(tensors))
    shards.close()
    return QuantizedCheckpoint(number_format, before, shards.bytes, tuple(errors), tuple(uneven))


def _error(name: str, values: Tensor, pieces: Pieces, change: Factors, scheme: Scheme) -> TensorError:
    """Of what it stands for once the factors that the matrix was written with are taken back."""
    wide, whole = values.float(), tuple(slice(0, size) for size in values.shape)
    off = change.inverse().apply(at_work(scheme).widen(pieces, whole)) - wide
    return TensorError(name, float(off.norm() / wide.norm().clamp_min(1e-30)), float(off.abs().max()))


def _write_config(source: Path, folder: Path, target: Target) -> None:
    """config.json with the quantization told, and beside it the tokenizer and whatever else is no weight."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = target.config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in _COPIED:
        for path in source.glob(pattern):
            copy = folder / path.relative_to(source)
            if copy.parent != folder or path.name not in _NOT_COPIED:
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def _skipped(tensors: list[Rewritten], reader: ViewReader) -> list[str]:
    """Modules that are linear to others and stay as they were: the head, routers, and whatever is not read here."""
    matrices = [
        tensor.name
        for tensor in tensors
        if not tensor.is_linear and tensor.name.endswith(".weight") and len(reader.stored_shape(tensor.name)) > 1
    ]
    modules = [name.removesuffix(".weight") for name in matrices if not name.endswith("embed_tokens.weight")]
    return list(dict.fromkeys(["lm_head", *modules]))
