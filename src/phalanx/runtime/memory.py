"""The memory of a rank: what a step takes, what the graphs take, and what is left for keys and values."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator

import psutil
import torch

from phalanx.errors import ConfigError
from phalanx.layers.decoder import Decoder
from phalanx.runtime import memory_limit
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rehearsal import worst_step
from phalanx.runtime.runner import TorchRunner, is_out_of_memory
from phalanx.runtime.warm_up import all_graphs, build, largest_graphs, rehearse
from phalanx.spec import ModelSpec
from phalanx.spec.cache import StatePlaces
from phalanx.spec.step_memory import KEPT_FREE, SYSTEM_SHARE, layer_bytes, score_bytes

MIB = 2**20
GIB = 2**30

log = logging.getLogger("phalanx.memory")

CPU_KV_SHARE = 0.25
"""Of a CPU's free memory, which other programs use too."""

LEAST_GRAPH_BYTES = MIB
OWN_CONTEXT = GIB
"""At most, what CUDA itself takes for a process, which looks like another program's memory."""


def room_for_cache(config: EngineConfig, model: Decoder, ranks_here: int, ranks_on_gpu: int) -> int:
    """Bytes that this rank has for keys and values, once a worst step, all graphs and adapters have theirs.

    On GPUs all ranks have to call this at once: the step is a real one.
    """
    if model.place.device.type == "cpu":
        return _room_on_cpu(config, model, ranks_here) - config.lora_memory
    return _room_on_gpu(config, model, ranks_on_gpu) - config.lora_memory


def _room_on_cpu(config: EngineConfig, model: Decoder, ranks_here: int) -> int:
    """Here a worst step is reckoned, not run, which could take a minute. What was not asked for is a share only.

    Pages of the cache are taken when they are first written to, long after this: a service's limit has to be known now.
    """
    free = min(psutil.virtual_memory().available, memory_limit.left() or sys.maxsize) // ranks_here
    if config.gpu_memory_utilization is not None:
        share = _of_all(config.gpu_memory_utilization, ranks_here)
    elif config.kv_cache_memory or config.num_blocks:
        share = free
    else:
        share = int(free * CPU_KV_SHARE)
    return min(share, free - needed_bytes(config, model, config.max_num_batched_tokens, config.max_num_seqs))


def _of_all(share: float, ranks_here: int) -> int:
    """What this process may still take of its part of the machine's memory."""
    return int(share * psutil.virtual_memory().total) // ranks_here - psutil.Process().memory_info().rss


def _room_on_gpu(config: EngineConfig, model: Decoder, ranks_on_gpu: int) -> int:
    device = model.place.device
    free, total = torch.cuda.mem_get_info(device)
    kept = _kept_free(config, device, total, used_elsewhere(device, free, total, ranks_on_gpu))
    try:
        left, further_graphs = _beside_the_most(config, model)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        needed = needed_bytes(config, model, config.max_num_batched_tokens, config.max_num_seqs)
        missing = max(needed // 2, needed - free // ranks_on_gpu)
        raise too_little(config, model, free // ranks_on_gpu, missing) from error
    gc.collect()
    torch.cuda.empty_cache()
    return int(left - kept) // ranks_on_gpu - further_graphs


def used_elsewhere(device: torch.device, free: int, total: int, ranks: int) -> int:
    """What is taken of a GPU's memory, but not by the weights of the ranks on it."""
    return max(0, total - free - ranks * torch.cuda.memory_reserved(device))


def _kept_free(config: EngineConfig, device: torch.device, total: int, elsewhere: int) -> float:
    """Bytes that stay free: the share that is not the engine's, less what others have of it already."""
    safe, asked = safe_share(device), config.gpu_memory_utilization
    if asked is not None and elsewhere > (1 - asked) * total + OWN_CONTEXT:
        raise ConfigError(
            "memory_in_use",
            f"gpu_memory_utilization is {asked:g}, but {elsewhere / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are in "
            "use by other programs.",
            f"End them, or use at most {int(100 * (1 - elsewhere / total)) / 100:.2f}.",
        )
    if asked is not None and asked > safe:
        log.warning("gpu_memory_utilization %g is more than is safe on this machine: %.2f.", asked, safe)
    return max(KEPT_FREE * total, (1 - (asked or safe)) * total - elsewhere)


def safe_share(device: torch.device) -> float:
    """Of a GPU's memory, what an engine may take: of memory that is the system's too, not what that needs."""
    integrated = torch.cuda.get_device_properties(device).is_integrated
    return 1 - (SYSTEM_SHARE if integrated else KEPT_FREE)


def _beside_the_most(config: EngineConfig, model: Decoder) -> tuple[int, int]:
    """Bytes that are free beside the largest graphs and a worst step, and what all further graphs will take of them.

    Keys and values have a single block meanwhile. The step comes last: a capture gives back what steps have left.
    """
    place, longest = model.place, longest_sequence(config, model)
    model.allocate_cache(1, config.block_size)
    model.allocate_states(state_places(config, place.spec).total)
    runner = TorchRunner(model, config.max_num_seqs, config.max_num_batched_tokens, longest, config.drafts)
    worst, sketch, largest = worst_step(*runner.limits, place.spec.vocab), model.sketch(), largest_graphs(runner)

    def rehearsal() -> None:
        if config.warm_up == "off":
            runner.rehearse(worst, sketch)
        else:
            rehearse(runner)
        for graph in largest if config.warm_up == "off" else all_graphs(runner):
            graph.rehearse()

    engine = (
        place.spec,
        place.group.size,
        place.group.rank,
        place.dtype,
        place.fp8_cache,
        place.units,
        runner.limits,
        config.warm_up,
    )
    build(rehearsal, place.device, repr(engine))
    for graph in largest:
        graph.capture()
    before = torch.cuda.mem_get_info(place.device)[0]
    alike = [graph._replace(kind=graph.kind._replace(drawn=False)) for graph in largest]
    for graph in alike:
        graph.capture()
    taken = before - torch.cuda.mem_get_info(place.device)[0]
    each = max(LEAST_GRAPH_BYTES, taken // max(1, len(alike)))
    runner.rehearse(worst, model)
    place.group.all_reduce(torch.zeros(1, device=place.device))  # where ranks share a GPU, all have taken theirs
    torch.cuda.synchronize(place.device)
    left = torch.cuda.mem_get_info(place.device)[0]
    return left, each * len(all_graphs(runner)[2 * len(largest) :])


def longest_sequence(config: EngineConfig, model: Decoder) -> int:
    return min(config.max_model_len or model.place.spec.max_positions, model.place.spec.max_positions)


def needed_bytes(config: EngineConfig, model: Decoder, tokens: int, rows: int) -> int:
    """What a step takes, and beside it all states, whatever the lengths of their sequences."""
    places = state_places(config, model.place.spec, rows)
    return step_bytes(config, model, tokens, rows) + places.total * model.state_bytes_per_place


def state_places(config: EngineConfig, spec: ModelSpec, rows: int | None = None) -> StatePlaces:
    with_twins = config.speculate != "off" and not spec.goes_back
    return StatePlaces.of(rows or config.max_num_seqs, config.prefix_caching, with_twins)


def step_bytes(config: EngineConfig, model: Decoder, tokens: int, rows: int) -> int:
    """About what a step takes: its widest layer for all tokens, or the scores of all rows and what is made of them.

    A CPU also has a mask over the longest sequence for each prompt and each window, and gathers keys and values of one.
    A sequence that may be as long as there is room is reckoned with as many tokens as a step has.
    """
    place, rows = model.place, min(rows, tokens)
    spec, size = place.spec, place.dtype.itemsize
    own = max(layer.mixer.working_bytes(tokens, rows) for layer in model.all_layers)
    layer = layer_bytes(place.layout, place.group.rank, tokens, size, own)
    longest = min(config.max_model_len or tokens, spec.max_positions)
    if place.device.type == "cpu":
        kept = 4 * len(place.shard.kv_heads) * spec.head_dim * size
        windows = len({(cache.kind, cache.reach) for cache in spec.caches})
        layer += longest * (windows * tokens * size + 2 * min(tokens, longest) + kept)
    return max(layer, score_bytes(rows, spec.vocab, longest, tokens))


def too_little(config: EngineConfig, model: Decoder, left: int, missing: int) -> ConfigError:
    """Says which limit to lower, and to what, so that a step takes less by what is missing."""
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    found = (
        f"{max(0, left) / MIB:.0f} MiB are left on rank {model.place.group.rank} for a step of {tokens} tokens in "
        f"{rows} sequences and keys and values; {missing / MIB:.0f} MiB more are needed."
    )
    goal = needed_bytes(config, model, tokens, rows) - missing
    fewer = ((t, r) for r in _halved(rows) for t in _halved(tokens) if needed_bytes(config, model, t, r) <= goal)
    tokens, rows = next(fewer, (0, 0))
    names = [
        ("max_num_batched_tokens", tokens, config.max_num_batched_tokens),
        ("max_num_seqs", rows, config.max_num_seqs),
    ]
    lower = " and ".join(f"{name} to {value}" for name, value, given in names if value < given)
    others = "use more ranks or a smaller model, or end other programs that use this memory."
    return ConfigError("step_too_large", found, f"Lower {lower}, {others}" if tokens else others.capitalize())


def _halved(limit: int) -> Iterator[int]:
    while limit:
        yield limit
        limit //= 2
