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
from phalanx.models.family import Family
from phalanx.models.fields import Config, Fields
from phalanx.models.quantization import LOADED, unloadable
from phalanx.models.registry import families, served
from phalanx.spec.model import ModelSpec, Refusal

INERT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "layer_types",
        "max_position_embeddings",
        "model_type",
        "name_or_path",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "resid_pdrop",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "sliding_window",
        "tf_legacy_loss",
        "tie_word_embeddings",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
        "use_mtp",
        "unsloth_fixed",
        "unsloth_version",
        "vision_config",
    ]
)
"""Fields that change nothing of what a model computes, or that say how what others ask for is to be done.

A field that is not known at all is taken for one that does, unless it is false, zero or empty.
"""


MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt tells of its format, if config.json does not."""


def read_config(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec that can be served, from a config dictionary, a `config.json` or the folder that holds one."""
    spec = describe(source)
    if spec.refusal is not None:
        raise ModelError(*spec.refusal)
    return spec


def describe(source: Config | str | Path) -> ModelSpec:
    """A ModelSpec of any family that can be planned; its `refusal` says why the runtime would not serve it."""
    config = source if isinstance(source, Mapping) else _read_json(Path(source))
    fields = Fields(_text_part(config))
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in families():
        raise _unknown_family(name)
    family = families()[name]
    try:
        spec = family.read(fields)
        return dataclasses.replace(spec, refusal=spec.refusal or _refusal(name, family, fields))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
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


def _unknown_family(name: object) -> ModelError:
    near = get_close_matches(str(name), families(), n=1)
    planned = ", ".join(each for each, family in families().items() if family.planned_only)
    return ModelError(
        "unknown_architecture",
        f"The configuration says model_type {name!r}.",
        (f"The nearest is {near[0]}. " if near else "")
        + f"Phalanx runs {', '.join(served())}"
        + (f", and plans for {planned} too." if planned else "."),
    )


def _refusal(name: str, family: Family, fields: Fields) -> Refusal | None:
    if family.planned_only is not None:
        return Refusal(
            "unsupported_architecture",
            f"The configuration says model_type {name!r}: {family.planned_only}.",
            f"Phalanx runs {', '.join(served())}.",
        )
    unread = [field for field in fields.unread() if field not in INERT and field not in family.inert]
    unknown = [field for field in unread if fields[field]]
    if unknown:
        return Refusal(
            "unknown_field",
            f"The configuration has {', '.join(f'{field} = {fields[field]!r}'[:80] for field in unknown[:3])}, "
            f"which Phalanx does not know of {name}: it might change what the model computes.",
            "Remove it from config.json if it does not.",
        )
    quantization = fields.get("quantization_config") or {}
    obstacle = unloadable(quantization)
    if obstacle is None:
        return None
    return Refusal(
        "unsupported_quantization",
        f"The checkpoint is quantised as {quantization.get('quant_method')!r}, and {obstacle}.",
        f"Phalanx reads bf16, fp16, fp32, GGUF, {LOADED}: use such a version.",
    )


def _read_json(path: Path) -> Config:
    folder, path = path, path / "config.json" if path.is_dir() else path
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
    beside = folder / MODELOPT_FILE
    if "quantization_config" not in config and beside.is_file():
        told = _read_json(beside).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt", **(told if isinstance(told, dict) else {})}
    return config
