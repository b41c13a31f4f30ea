"""Reads a Hugging Face `config.json` into a ModelSpec.

`describe` reads every family that can be planned; `read_config` those of them that the runtime serves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from phalanx.errors import ModelError
from phalanx.spec.families import DEFAULTS, FAMILIES, SERVED
from phalanx.spec.fields import Config
from phalanx.spec.model import ModelSpec, Refusal
from phalanx.spec.quantization import is_loadable


def read_config(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec that can be served, from a config dictionary, a `config.json` or the folder that holds one."""
    spec = describe(source)
    if spec.refusal is not None:
        raise ModelError(*spec.refusal)
    return spec


def describe(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec of any family that can be planned; its `refusal` says why the runtime would not serve it."""
    config = source if isinstance(source, Mapping) else _read_json(Path(source))
    config = _text_part(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise _unknown_family(family)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            "unsupported_activation",
            f"The configuration says hidden_act {config['hidden_act']!r}.",
            f"Phalanx runs {family} models with 'silu'.",
        )
    given = {key: value for key, value in config.items() if value is not None}
    try:
        spec = FAMILIES[family](DEFAULTS.get(family, {}) | given)
        return dataclasses.replace(spec, refusal=_refusal(family, given))
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(
            "bad_config",
            f"The configuration has a value of the wrong kind: {error}.",
            "Compare it with the model's own config.json.",
        ) from error


def _text_part(config: Config) -> Config:
    """The language model of a configuration that also describes eyes or ears."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {key: config[key] for key in ("model_type", "quantization_config", "torch_dtype", "dtype") if key in config}
    return outer | {key: value for key, value in text.items() if value is not None}


def _unknown_family(family: object) -> ModelError:
    near = get_close_matches(str(family), FAMILIES, n=1)
    planned = ", ".join(name for name in FAMILIES if name not in SERVED)
    return ModelError(
        "unknown_architecture",
        f"The configuration says model_type {family!r}.",
        (f"The nearest is {near[0]}. " if near else "")
        + f"Phalanx runs {', '.join(SERVED)}, and plans for {planned} too.",
    )


def _refusal(family: str, config: Config) -> Refusal | None:
    if family not in SERVED:
        return Refusal(
            "unsupported_architecture",
            f"The configuration says model_type {family!r}, which Phalanx plans for but does not run.",
            f"Phalanx runs {', '.join(SERVED)}.",
        )
    quantization = config.get("quantization_config")
    if not quantization or is_loadable(quantization):
        return None
    return Refusal(
        "unsupported_quantization",
        f"The checkpoint is quantised as {quantization.get('quant_method')!r} "
        f"({quantization.get('format') or quantization.get('bits') or 'no further format'}).",
        "Phalanx reads bf16, fp16, fp32, FP8 with a scale per block or per channel, and GGUF: use such a version.",
    )


def _read_json(path: Path) -> Config:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            "no_config", f"There is no {path}.", "Name a folder that holds a Hugging Face checkpoint."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError("bad_config", f"{path} is not JSON: {error}.", "Download the file again.") from None
    if not isinstance(config, dict):
        raise ModelError("bad_config", f"{path} holds no JSON object.", "Download the file again.")
    return config
