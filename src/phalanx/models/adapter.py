"""LoRA adapters as PEFT writes them: read, and checked against the model they are for. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import AdapterError
from phalanx.spec import DeltaNet, Dense, Gqa, Mla, ModelSpec
from phalanx.spec.layer import Mixer
from phalanx.spec.tensors import Run, Stored, Tensor

MOST_BYTES = 2**31
MOST_CONFIG_BYTES = 2**20
MOST_RANK = 512
_FLOATS = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "layer_replication": (None, []),
}
"""Fields of an adapter's configuration that change what it computes, and the values that change nothing."""


class AdaptedModule(msgspec.Struct, frozen=True, array_like=True):
    """A matrix of the model and the names of what is added to it: `up` times `down`.

    Where checkpoints keep several matrices as one, `run` are the rows of `up` that are this one's.
    """

    down: str
    up: str
    rank: int
    run: Run | None = None


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """What is added to the model's matrices, by their names: scale * up @ down. `data` is the file with all of them."""

    modules: dict[str, AdaptedModule]
    scale: float
    data: bytes

    def rank_bytes(self, spec: ModelSpec) -> int:
        """At most what a rank holds of it, in float32: up to four matrices are one product, with zeros between them."""
        shapes = [(module.rank, spec.tensors[f"{name}.weight"].shape) for name, module in self.modules.items()]
        return sum(4 * rank * (columns + 4 * rows) for rank, (rows, columns) in shapes)


class AdapterOrder(msgspec.Struct, frozen=True, array_like=True):
    """What ranks are told: to hold an adapter by this number, or, without one, to hold it no longer."""

    number: int
    adapter: Adapter | None = None


def read_adapter(folder: Path, spec: ModelSpec) -> Adapter:
    """An adapter from its folder. AdapterError says what is wrong with it, by name."""
    config = _config(folder)
    data = _data(folder)
    shapes = _shapes(data, folder)
    base = str(config.get("base_model_name_or_path") or "another model")
    rank = config["r"]
    named: dict[str, dict[str, str]] = {}
    for tensor in shapes:
        found = _TENSOR.fullmatch(tensor)
        if found is None:
            raise AdapterError("bad_adapter", f"{tensor} is no part of a LoRA.", "Use an adapter made by PEFT's LoRA.")
        named.setdefault(found[1].removeprefix(_PREFIX), {})[found[2]] = tensor
    adaptable: dict[str, list[tuple[Tensor, Run | None]]] = {}
    for module, tensor_of_model, run in adaptable_modules(spec):
        adaptable.setdefault(module, []).append((tensor_of_model, run))
    modules = {}
    for module, parts in sorted(named.items()):
        changed = _adapted(module, adaptable, spec)
        for letter in "AB":
            if letter not in parts:
                raise AdapterError(
                    "missing_tensor", f"The adapter has no lora_{letter} for {module}.", "Download all of it."
                )
        (tensor_of_model, run), *_ = changed
        rows, columns = tensor_of_model.shape
        rows = rows // run.width * run.stride if run else rows
        for letter, wanted in (("A", (rank, columns)), ("B", (rows, rank))):
            if shapes[parts[letter]] != wanted:
                raise _misshapen(parts[letter], shapes[parts[letter]], wanted, rank, base)
        for tensor_of_model, run in changed:
            modules[tensor_of_model.name.removesuffix(".weight")] = AdaptedModule(parts["A"], parts["B"], rank, run)
    _check_targets(config.get("target_modules"), named)
    scale = config["lora_alpha"] / (sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(modules, scale, data)


def adaptable_modules(spec: ModelSpec) -> Iterator[tuple[str, Tensor, Run | None]]:
    """By the names that checkpoints have for them: projections of attention, of delta nets and of dense FFNs. Of
    matrices that are kept as one, each comes with its rows in it.
    """
    for number, layer in enumerate(spec.layers):
        names = _of_mixer(layer.mixer)
        if isinstance(layer.ffn, Dense):
            names += [f"{layer.ffn.module}.{name}_proj" for name in ("gate", "up", "down")]
        for name in names:
            tensor = spec.tensors[f"model.layers.{number}.{name}.weight"]
            for source in tensor.sources or (Stored(tensor.name),):
                if not source.packed and replace(source, run=None).is_plain:
                    yield source.name.removesuffix(".weight"), tensor, source.run


def _of_mixer(mixer: Mixer) -> list[str]:
    match mixer:
        case Gqa():
            names = ["q_proj", "k_proj", "v_proj", "o_proj", *(["q_gate"] if mixer.gated else [])]
        case Mla():
            names = [*(["q_a_proj", "q_b_proj"] if mixer.q_rank else ["q_proj"]), "kv_a_proj_with_mqa", "o_proj"]
        case DeltaNet():
            names = [*(f"in_proj_{letter}" for letter in "qkvzba"), "out_proj"]
        case _:
            return []
    return [f"{mixer.module}.{name}" for name in names]


def _adapted(
    module: str, adaptable: dict[str, list[tuple[Tensor, Run | None]]], spec: ModelSpec
) -> list[tuple[Tensor, Run | None]]:
    if module in adaptable:
        return adaptable[module]
    if f"{module}.weight" in spec.tensors or "expert" in module:
        found = f"The adapter changes {module}, which is held here in a way that no adapter can be added to."
    else:
        found = f"The adapter changes {module}, which this model has not."
    kinds = sorted({name.rpartition(".")[2] for name in adaptable})
    can = f"Of this model, {', '.join(kinds)} can be adapted" if kinds else "Nothing of this model can be adapted"
    raise AdapterError("unknown_module", found, f"{can}: projections of mixers and of dense FFNs, not experts.")


def _misshapen(name: str, found: tuple[int, ...], wanted: tuple[int, ...], rank: int, base: str) -> AdapterError:
    other_rank = sum(one != other for one, other in zip(found, wanted, strict=False)) == 1 and rank not in found
    if len(found) == len(wanted) and other_rank:
        why, fix = f"the adapter's rank is {rank}", "Its configuration belongs to another file."
    else:
        why, fix = f"this model takes {wanted}", f"It was made for {base}: use it with that."
    return AdapterError("wrong_shape", f"{name} has the shape {found}, but {why}.", fix)


def _check_targets(targets: Any, named: dict[str, dict[str, str]]) -> None:
    """Every module that the configuration names has a part in the file."""
    if isinstance(targets, list):
        for target in targets:
            if not any(module == target or module.endswith(f".{target}") for module in named):
                raise AdapterError(
                    "missing_tensor", f"The adapter names {target!r} and has no tensors for it.", "Download all of it."
                )
    if not named:
        raise AdapterError("missing_tensor", "The adapter has no tensors.", "Download all of it.")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(folder / "adapter_config.json", MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(
            "no_adapter",
            f"{folder} has no adapter_config.json that can be read ({type(error).__name__}).",
            "Name the folder of a LoRA adapter in PEFT's form.",
        ) from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise AdapterError("bad_adapter", f"The adapter's peft_type is {kind!r:.100}.", "Only LORA is served.")
    for name, inert in _NOT_HERE.items():
        if config.get(name) not in inert:
            found = f"The adapter has {name} = {config[name]!r:.100}."
            raise AdapterError("bad_adapter", found, "Merge it into the model.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise AdapterError("bad_adapter", f"The adapter's rank r is {rank!r}.", f"Ranks from 1 to {MOST_RANK} work.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isfinite(alpha):
        raise AdapterError("bad_adapter", f"The adapter's lora_alpha is {alpha!r}.", "It must be a number.")
    return config


def _read(path: Path, most: int) -> bytes:
    """Of a plain file alone: a pipe or a device would be read for ever."""
    if not path.is_file():
        raise FileNotFoundError(path)
    if path.stat().st_size > most:
        raise AdapterError("bad_adapter", f"{path} has more than {most} bytes.", "Use a smaller rank.")
    return path.read_bytes()


def _data(folder: Path) -> bytes:
    try:
        return _read(folder / "adapter_model.safetensors", MOST_BYTES)
    except OSError:
        raise AdapterError(
            "no_adapter", f"{folder} has no adapter_model.safetensors.", "Save it as safetensors: nothing is unpickled."
        ) from None


def _shapes(data: bytes, folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a safetensors file, by the library that ranks read them with: what is wrong ends here."""
    from safetensors import SafetensorError, deserialize  # plans are made without it

    damaged = f"adapter_model.safetensors in {folder} is damaged"
    try:
        tensors = dict(deserialize(data))
    except SafetensorError as error:
        raise AdapterError("bad_adapter", f"{damaged}: {str(error)[:200]}.", "Download it again.") from None
    for name, tensor in tensors.items():
        if tensor["dtype"] not in _FLOATS:
            raise AdapterError("bad_adapter", f"{damaged}: {name[:200]} is {tensor['dtype']}.", "Download it again.")
    return {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
