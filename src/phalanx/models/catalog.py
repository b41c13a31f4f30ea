"""The catalog: flagship models by name, any configuration on disk, or a Hugging Face id."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError
from phalanx.models.config import describe
from phalanx.spec.formats import FORMATS
from phalanx.spec.model import ModelSpec

_DECORATIONS = re.compile(r"-(instruct|chat|hf|it|base|meta)\b|^meta-")
_PATIENCE_S = 3.0
_FORMAT_SUFFIXES = {
    "fp8": "fp8",
    "fp8-dynamic": "fp8-channel",
    "awq": "awq",
    "awq-int4": "awq",
    "gptq": "gptq",
    "gptq-int4": "gptq",
    "int4": "int4",
    "w4a16": "int4",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "bf16": "bf16",
}


_HEARSAY = {
    "qwen3-72b": "Dense Qwen3 end at 32B: Qwen3-32B is of this generation, Qwen2.5-72B of this size. ",
    "qwen3.5-235b-a17b": "Qwen3-235B-A22B has these parameters, Qwen3.5-397B-A17B these active ones. ",
    "qwen3.5-72b": "Dense Qwen3.5 end at 27B (Qwen3.5-27B); Qwen2.5-72B is of this size. ",
    "llama-3.3-8b": "Llama 3.3 is 70B alone (Llama-3.3-70B); Llama-3.1-8B is of this size. ",
    "llama-4-70b": "Llama 4 is Scout (109B) and Maverick (400B); Llama-3.3-70B is of this size. ",
    "deepseek-v4": "It comes as DeepSeek-V4-Flash and DeepSeek-V4-Pro. ",
    "deepseek-r2": "There is none: DeepSeek-R1 and DeepSeek-V3.2 are the nearest. ",
}
"""Names that are written about but do not exist, and what differs in the nearest that do (2026-11, from memory)."""


@dataclass(frozen=True)
class Entry:
    """A model of the catalog. The first of `ids` is where its weights are; `variants` are other formats by their id."""

    name: str
    ids: tuple[str, ...]
    variants: Mapping[str, str]
    config: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return _described(self.name)

    def checkpoint(self, *number_formats: str, loads: Callable[[str], bool] = bool) -> str | None:
        """The id of a checkpoint in the first of these formats that there is one in, of those that are loaded."""
        known = [(self.ids[0], self.spec.number_format), *self.variants.items()]
        fitting = (name for wanted in number_formats for name, found in known if found == wanted)
        return next(filter(loads, fitting), None)


@cache
def entries() -> dict[str, Entry]:
    """The catalog by name, in the order of its file."""
    told = tomllib.loads((files("phalanx.models") / "models.toml").read_text(encoding="utf-8"))["models"]
    found: dict[str, Entry] = {}
    for name, model in told.items():
        base = found[model["like"]].config if "like" in model else {}
        found[name] = Entry(name, tuple(model["ids"]), model.get("variants", {}), {**base, **model["config"]})
    return found


@cache
def _described(name: str) -> ModelSpec:
    return describe(entries()[name].config)


def model(name: str) -> ModelSpec:
    """The spec of a catalog name, of a `config.json` or the folder that holds one, or of a Hugging Face id."""
    found = find(name)
    if found is not None:
        entry, number_format = found
        return entry.spec if number_format is None else entry.spec.in_format(number_format)
    path = Path(name).expanduser()
    if path.exists():
        return describe(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return describe(_download_config(name))
    raise _unknown(name, f"{name!r} is neither a model of the catalog, nor a file or folder, nor a Hugging Face id.")


def published_fp8(spec: ModelSpec) -> str:
    """The format of the FP8 checkpoints there are of a model in bf16: its own makers' are scaled by block, those of
    third parties by channel or tensor.
    """
    return "fp8" if spec.model_type.startswith("qwen3") else "fp8-channel"


def known(name: str) -> Entry:
    """The catalog's model of that name or id; what is on disk or elsewhere is not looked at."""
    found = find(name)
    if found is None:
        raise ModelError(
            "unknown_model",
            f"{name!r} is not in the catalog.",
            f"{_nearest(name)}`phalanx plan` also takes a config.json or a Hugging Face id.",
        )
    return found[0]


def find(name: str) -> tuple[Entry, str | None] | None:
    """The catalog's model of that name or id, and the format the name asks for if it asks for one."""
    names = _names()
    plain = _plain(name)
    if plain in names:
        return names[plain]
    for suffix, number_format in _FORMAT_SUFFIXES.items():
        bare = plain.removesuffix(f"-{suffix}")
        if bare != plain and bare in names:
            return names[bare][0], number_format
    return None


@cache
def _names() -> dict[str, tuple[Entry, str | None]]:
    """Every name a catalog model goes by, as `_plain` writes it."""
    found: dict[str, tuple[Entry, str | None]] = {}
    for entry in entries().values():
        for name in (entry.name, *entry.ids):
            found.setdefault(_plain(name), (entry, None))
        for name, number_format in entry.variants.items():
            found.setdefault(_plain(name), (entry, number_format))
    return found


def _plain(name: str) -> str:
    """Small letters, without the owner and without words that do not change the shape of the model."""
    text = name.strip().lower().rpartition("/")[2].replace("_", "-").replace(" ", "-")
    return _DECORATIONS.sub("", text)


@cache
def _hub_answers(address: str) -> bool:
    """Asked once, with little patience: the hub's own client retries for half a minute."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(address, method="HEAD"), timeout=_PATIENCE_S).close()
    except HTTPError:
        return True
    except (URLError, TimeoutError, OSError):
        return False
    return True


def _download_config(model_id: str) -> Path:
    """Its config.json from the cache or the hub, and nothing else of it."""
    try:
        from huggingface_hub import constants, hf_hub_download

        offline = not _hub_answers(constants.ENDPOINT)
        return Path(hf_hub_download(model_id, "config.json", local_files_only=offline))
    except ImportError:
        reason = "huggingface_hub is not installed"
    except Exception as error:  # the hub's errors, requests' and httpx's have no common base
        reason = type(error).__name__
    raise _unknown(model_id, f"{model_id} is not in the catalog and its config.json could not be had ({reason}).")


def _unknown(name: str, found: str) -> ModelError:
    return ModelError(
        "unknown_model", found, f"{_nearest(name)}Or name a config.json. Catalog: {', '.join(entries())}."
    )


def _nearest(name: str) -> str:
    if _plain(name) in _HEARSAY:
        return _HEARSAY[_plain(name)]
    plain = {_plain(known): known for known in entries()}
    near = get_close_matches(_plain(name), plain, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(plain[match] for match in near)}? " if near else ""


def check_format(number_format: str) -> str:
    """The name of a known number format, or a refusal that names the nearest."""
    if number_format not in FORMATS:
        near = get_close_matches(number_format, FORMATS, n=1)
        raise ModelError(
            "unknown_format",
            f"{number_format!r} is no number format.",
            (f"Did you mean {near[0]}? " if near else "") + f"Known: {', '.join(FORMATS)}.",
        )
    return number_format
