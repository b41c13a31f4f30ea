"""Building one rank: its share of the model loaded, its KV cache sized."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import psutil
import torch

from phalanx.engine.caches import CacheLayout
from phalanx.errors import ConfigError
from phalanx.fabric.choose import ProcessGroup, choose_group
from phalanx.fabric.group import Group
from phalanx.fabric.pace import measure_pace
from phalanx.fabric.tree import TreeGroup
from phalanx.kernels import cpu
from phalanx.kernels.sampling_table import TOKEN
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.layers.watch import Canary
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.memory import MIB, room_for_cache, state_places, too_little
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.warm_up import warm_up
from phalanx.runtime.weight_watch import WeightWatch
from phalanx.spec import Layout, ModelSpec, Scheme
from phalanx.spec.cache import token_blocks
from phalanx.spec.invariant import inner_units, invariant_layout
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import Progress, check_tensors, load_weights
from phalanx.weights.reader import Reader

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_PACK_SHARE = 0.25
_FP8_CAPABILITY = (8, 9)
_SCORES_IN_A_LOAD = 4


class Sizes(msgspec.Struct, frozen=True):
    """What all ranks agree on once each knows its memory."""

    num_blocks: int
    max_model_len: int


def cache_layout(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> CacheLayout:
    reaches = tuple(group.reach for group in spec.window_groups)
    ids = 0 if spec.keeps_all_tokens else token_blocks(config.max_num_seqs, max_model_len, config.block_size)
    return CacheLayout(reaches, spec.has_states, *state_places(config, spec), ids)


class Spot(msgspec.Struct, frozen=True):
    """Where on its machine a rank runs: which of the GPUs it sees, how many ranks share the machine and that GPU."""

    gpu: int = 0
    ranks_here: int = 1
    ranks_on_gpu: int = 1


_ALONE = Spot()


def local_spots(config: EngineConfig) -> list[Spot]:
    """One for every rank of this machine: a GPU each, unless they are to share those there are."""
    gpus = config.tp
    if config.share_gpus and on_gpus(config):
        gpus = max(1, min(config.tp, torch.cuda.device_count()))
    return [Spot(rank % gpus, config.tp, -(-config.tp // gpus)) for rank in range(config.tp)]


def make_group(config: EngineConfig, rank: int, spot: Spot) -> ProcessGroup:
    """The group this rank talks in, not connected yet."""
    gpus = [each.gpu for each in local_spots(config)] if config.executor == "local" else None
    return choose_group(rank, config.tp, pick_device(config, spot.gpu), gpus)


def learn_pace(config: EngineConfig, model: Decoder, host: str) -> None:
    """Of links between machines nobody knows what to expect. All ranks have to call this at once, once connected."""
    if config.executor != "local":
        model.place.group.pace = measure_pace(model.place.group, model.place.device, host)


def on_gpus(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def pick_device(config: EngineConfig, gpu: int) -> torch.device:
    if not on_gpus(config):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    needed = config.tp if config.executor == "local" and not config.share_gpus else gpu + 1
    if needed > found:
        raise ConfigError(
            "too_few_gpus",
            f"TP={config.tp}, but {found} GPUs are visible.",
            f"Use TP <= {found}. To try things out, ranks can share a GPU (share_gpus).",
        )
    return torch.device("cuda", gpu)


def device_name(config: EngineConfig) -> str:
    """`cpu`, or what rank 0's GPU is called by its driver."""
    device = pick_device(config, 0)
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def pick_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where half precision is slow or missing; the checkpoint's own dtype on a GPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else _DTYPES[spec.dtype]
    return _DTYPES[config.dtype]


def load_model(
    config: EngineConfig, checkpoint: Checkpoint, group: Group, progress: Progress, spot: Spot = _ALONE
) -> Decoder:
    """This rank's share of the model, and of a smaller one that drafts for it, with their weights in place."""
    model = _load_share(config, checkpoint, group, progress, spot)
    if checkpoint.companion is not None:
        model.companion = _load_share(config, checkpoint.companion, group, lambda done, total: None, spot)
    return model


def _load_share(config: EngineConfig, checkpoint: Checkpoint, group: Group, progress: Progress, spot: Spot) -> Decoder:
    device = pick_device(config, spot.gpu)
    on_gpu = device.type == "cuda"
    if on_gpu:
        if config.kv_cache_dtype == "fp8":
            _check_fp8(device)
        torch.cuda.set_device(device)
    reader = checkpoint.open_reader(device)
    try:
        place = place_of(config, checkpoint.spec, group, device, reader)
        check_tensors(place.layout, reader, group.rank)
        model = Decoder(place)
        load_weights(model, reader, progress, checked=True)
    finally:
        reader.close()
    if on_gpu:
        if model.draft_head is not None:
            model.draft_head.narrow_head()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        model.lay_out()
        _pack(model, spot.ranks_here)
    if config.canary and group.size > 1:
        model.watch = Canary(len(checkpoint.spec.layers), device)
    return model


def place_of(config: EngineConfig, spec: ModelSpec, group: Group, device: torch.device, reader: Reader) -> Place:
    """Where this rank's layers are built: its share, and in which formats weights are held."""
    dtype, on_gpu = pick_dtype(config, spec, device), device.type == "cuda"
    in_panels = not on_gpu and config.dtype == "auto" and cpu.library() is not None
    place = Place(
        Layout(spec, group.size),
        group,
        dtype,
        device,
        quantised=on_gpu or in_panels,
        fp8_cache=config.kv_cache_dtype == "fp8",
        in_panels=in_panels,
        stored=_stored(spec, reader) if in_panels else {},
    )
    if not config.invariant:
        return place
    _check_invariant(config, spec, dtype, device)
    return _invariant(place)


def _invariant(place: Place) -> Place:
    spec, group, together = place.spec, place.group, place.held_together
    return replace(
        place,
        layout=invariant_layout(spec, group.size, together),
        group=TreeGroup(group, place.dtype) if group.size > 1 else group,
        units=inner_units(spec, together) // group.size,
    )


def _check_invariant(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    exact = device.type == "cuda" or (dtype == torch.float32 and cpu.library() is not None)
    if not exact or config.kv_cache_dtype != "auto" or config.lora_memory:
        raise ConfigError(
            "not_invariant",
            "invariant is for GPUs, and for float32 on CPUs with a C compiler, without adapters and with keys and "
            f"values in the model's own dtype; this is {dtype} on {device.type}, with a KV cache in "
            f"{config.kv_cache_dtype} and {config.lora_memory} bytes for adapters.",
            "Use dtype and kv_cache_dtype auto and no adapters, or leave invariant out.",
        )
    if device.type == "cuda" and spec.quantization is not None:
        raise ConfigError(
            "not_invariant",
            f"This model has quantised weights ({spec.number_format}): a GPU's sums of these are not in one order yet.",
            "Use device cpu, or leave invariant out.",
        )
    if device.type == "cuda" and spec.vocab % _SCORES_IN_A_LOAD:
        raise ConfigError(
            "not_invariant",
            f"invariant on a GPU is for vocabularies of a multiple of {_SCORES_IN_A_LOAD} tokens; this one has "
            f"{spec.vocab}, and the library sums up rows of scores by where they lie.",
            "Use device cpu, or leave invariant out.",
        )


def _stored(spec: ModelSpec, reader: Reader) -> dict[str, Scheme]:
    """The formats of matrices as the files themselves tell."""
    schemes = ((name, reader.scheme_of(name)) for name, tensor in spec.tensors.items() if len(tensor.shape) == 2)
    return {name: scheme for name, scheme in schemes if scheme is not None}


def _check_fp8(device: torch.device) -> None:
    has = torch.cuda.get_device_capability(device)
    if has < _FP8_CAPABILITY:
        raise ConfigError(
            "no_fp8",
            f"kv_cache_dtype is 'fp8', but the GPU's compute capability is {has[0]}.{has[1]}; e4m3 needs "
            "{}.{}.".format(*_FP8_CAPABILITY),
            "Use kv_cache_dtype auto.",
        )


def _pack(model: Decoder, ranks_here: int) -> None:
    """Packed weights are a second copy: only where memory is plenty."""
    size = sum(product.weight.nbytes for product in model.products())
    if size * ranks_here < _CPU_PACK_SHARE * psutil.virtual_memory().available:
        for product in model.products():
            product.pack()


def blocks_that_fit(config: EngineConfig, model: Decoder, spot: Spot = _ALONE) -> int:
    """KV blocks this rank has memory for. On GPUs all ranks have to call this at once."""
    block_bytes = model.block_bytes(config.block_size)
    most = config.max_model_len or model.place.spec.max_positions
    room = room_for_cache(config, model, spot.ranks_here, spot.ranks_on_gpu)
    layout = cache_layout(config, model.place.spec, most)
    ids = config.block_size * TOKEN.itemsize
    room = (room - layout.token_blocks * ids) * block_bytes // (block_bytes + ids)
    if config.num_blocks is not None:
        _check_fits("num_blocks", config.num_blocks, config.num_blocks * block_bytes, room // block_bytes, model)
        return config.num_blocks
    budget = config.kv_cache_memory
    if budget is not None:
        _check_fits("kv_cache_memory", budget, budget, room, model)
        if budget < block_bytes:
            raise ConfigError(
                "kv_too_small",
                f"kv_cache_memory is {budget} on rank {model.place.group.rank}; one block of {config.block_size} "
                f"tokens takes {block_bytes}.",
                f"Raise kv_cache_memory to {block_bytes} or more.",
            )
    elif room < block_bytes:
        raise too_little(config, model, room, block_bytes - room)
    return min((budget or room) // block_bytes, layout.groups * config.max_num_seqs * -(-most // config.block_size))


def _check_fits(name: str, value: int, size: int, most: int, model: Decoder) -> None:
    if value > most:
        raise ConfigError(
            "kv_too_large",
            f"{name} is {value}, {size / MIB:.0f} MiB on rank {model.place.group.rank}; there is room for "
            f"{max(0, most)} beside the model and the largest step.",
            f"Lower {name} to {most}." if most > 0 else "Lower max_num_batched_tokens or max_num_seqs.",
        )


def agree_on_sizes(config: EngineConfig, spec: ModelSpec, blocks: list[int]) -> Sizes:
    """The smallest rank decides the blocks; a context that was not asked for shrinks to what they hold."""
    num_blocks = min(blocks)
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise ConfigError(
            "context_too_long",
            f"max_model_len is {config.max_model_len}, but the model was made for {spec.max_positions} positions.",
            f"Use at most {spec.max_positions}.",
        )
    longest = config.max_model_len or spec.max_positions
    room = cache_layout(config, spec, longest).longest(num_blocks, config.block_size)
    return Sizes(num_blocks, config.max_model_len or min(spec.max_positions, room))


def make_runner(config: EngineConfig, model: Decoder, sizes: Sizes) -> TorchRunner:
    """The rank's runner, warmed up as the config says. All ranks have to call this at once."""
    model.allocate_cache(sizes.num_blocks, config.block_size)
    model.allocate_states(state_places(config, model.place.spec).total)
    runner = TorchRunner(model, config.max_num_seqs, config.max_num_batched_tokens, sizes.max_model_len, config.drafts)
    if config.canary:
        runner.weights = WeightWatch(model)
    warm_up(runner, config.warm_up)
    return runner
