"""The memory of a rank is known before it serves: what a step takes, and what is left for keys and values.

On a GPU it is measured; here the card is a number, and graphs are run anew where they would be replayed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.errors import ConfigError
from phalanx.fabric.group import Solo
from phalanx.layers.decoder import Decoder
from phalanx.runtime import graphs, memory
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.memory import MIB, step_bytes
from phalanx.runtime.rank import Sizes, Spot, blocks_that_fit, load_model, make_runner
from phalanx.runtime.rehearsal import worst_step
from phalanx.runtime.runner import TorchRunner
from phalanx.runtime.speculate import open_checkpoint
from phalanx.runtime.warm_up import all_graphs
from tests.conftest import FAMILIES, Reference, make_checkpoint
from tests.runtime.replays import Repeater

CONFIG = EngineConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=200)


def load(folder: Path, config: EngineConfig = CONFIG) -> Decoder:
    return load_model(config, open_checkpoint(config, folder), Solo(), lambda done, total: None)


@pytest.fixture
def model(tiny_llama: Path) -> Decoder:
    return load(tiny_llama)


def allocated_by(runner: TorchRunner, trace: Path) -> int:
    """Bytes that a worst step holds at its worst, as torch's own profiler counts them."""
    plan = worst_step(*runner.limits, runner.model.place.spec.vocab)
    runner.rehearse(plan, runner.model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runner.rehearse(plan, runner.model)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    counts = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = int(counts[0]["Total Allocated"]) - int(counts[0]["Bytes"])
    return max(int(count["Total Allocated"]) for count in counts) - before


@pytest.mark.parametrize(("tokens", "seats", "longest"), [(256, 4, 512), (64, 64, 512), (512, 8, 160)])
def test_a_worst_step_is_reckoned_as_it_is(
    captured: Reference, tmp_path: Path, tokens: int, seats: int, longest: int
) -> None:
    """Wide layers, many scores, long masks: each decides in one of these cases."""
    config = EngineConfig(max_num_seqs=seats, max_num_batched_tokens=tokens, max_model_len=longest)
    model = load(captured.folder, config)
    taken = allocated_by(make_runner(config, model, Sizes(2, longest)), tmp_path / "trace.json")
    assert 0.9 * taken < step_bytes(config, model, tokens, seats) < 1.7 * taken


@pytest.fixture(scope="module")
def delta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose states are larger than all else of a step."""
    folder, heads = tmp_path_factory.mktemp("delta"), {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with pytest.MonkeyPatch.context() as patched:
        wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        patched.setitem(FAMILIES, "qwen3_5_text", FAMILIES["qwen3_5_text"] | heads | wide)
        make_checkpoint("qwen3_5_text", folder)
    return folder


@pytest.mark.parametrize(
    ("tokens", "seats", "longest", "states"),
    [(256, 4, 512, "auto"), (64, 64, 512, "auto"), (512, 8, 160, "auto"), (64, 64, 512, "bf16")],
)
def test_a_step_with_states_is_reckoned_as_it_is(
    delta_folder: Path, tmp_path: Path, tokens: int, seats: int, longest: int, states: str
) -> None:
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": tokens, "max_model_len": longest}
    config = EngineConfig(state_dtype=states, **limits)
    model = load(delta_folder, config)
    taken = allocated_by(make_runner(config, model, Sizes(2, longest)), tmp_path / "trace.json")
    assert 0.9 * taken < step_bytes(config, model, tokens, seats) < 1.7 * taken


def with_its_tokens(model: Decoder) -> int:
    """Bytes of a block, and of the tokens whose keys and values it holds."""
    return model.block_bytes(CONFIG.block_size) + 4 * CONFIG.block_size


def test_states_of_all_sequences_have_their_room_before_keys_and_values(
    delta_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(delta_folder)
    block, states = with_its_tokens(model), 33 * model.state_bytes_per_place
    step = step_bytes(CONFIG, model, 256, 16)
    give_memory(monkeypatch, step + states + 5 * block)
    assert blocks_that_fit(CONFIG, model) == 5
    make_runner(CONFIG, model, Sizes(2, 200))
    kept = [state for layer in model.layers for state in layer.mixer.states()]
    assert sum(state.nbytes for state in kept) == states
    assert sum(cache.state_bytes for cache in model.place.spec.caches) < model.state_bytes_per_place
    give_memory(monkeypatch, states * 3 // 4)
    with pytest.raises(ConfigError) as caught:
        blocks_that_fit(CONFIG, model)
    named = {name: int(value) for name, value in re.findall(r"(max_num\w+) to (\d+)", caught.value.fix)}
    assert named["max_num_seqs"] < 16
    assert blocks_that_fit(msgspec.structs.replace(CONFIG, **named), model) >= 1


def give_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


def test_a_cpu_gives_a_quarter_of_what_is_free_to_keys_and_values(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = with_its_tokens(model)
    step = step_bytes(CONFIG, model, 256, 16)
    give_memory(monkeypatch, 400 * block)
    assert 300 * block > step
    assert blocks_that_fit(CONFIG, model) == 100
    assert blocks_that_fit(CONFIG, model, Spot(ranks_here=2)) == 50
    give_memory(monkeypatch, step + 5 * block)
    assert blocks_that_fit(CONFIG, model) == 5


def test_a_service_has_no_more_than_its_limit_leaves(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 4000 * with_its_tokens(model))
    monkeypatch.setattr(memory.memory_limit, "left", lambda: 400 * with_its_tokens(model))
    assert blocks_that_fit(CONFIG, model) == 100


@pytest.mark.parametrize("short_by", [1, 300_000, 700_000])
def test_a_cpu_without_room_says_which_limit_to_lower_and_that_works(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, short_by: int
) -> None:
    block = with_its_tokens(model)
    give_memory(monkeypatch, step_bytes(CONFIG, model, 256, 16) + block - short_by)
    with pytest.raises(ConfigError) as caught:
        blocks_that_fit(CONFIG, model)
    assert caught.value.code == "step_too_large"
    assert "a step of 256 tokens in 16 sequences" in caught.value.found
    named = {name: int(value) for name, value in re.findall(r"(max_num\w+) to (\d+)", caught.value.fix)}
    assert "max_num_batched_tokens" in named
    lowered = msgspec.structs.replace(CONFIG, **named)
    assert blocks_that_fit(lowered, model) >= 1


def test_where_no_limit_helps_none_is_named(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 10)
    with pytest.raises(ConfigError) as caught:
        blocks_that_fit(CONFIG, model)
    assert "max_num" not in caught.value.fix
    assert "smaller model" in caught.value.fix


@pytest.mark.parametrize("name", ["kv_cache_memory", "num_blocks"])
def test_a_cache_larger_than_the_room_is_refused_with_what_fits(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    give_memory(monkeypatch, 100 * MIB)
    asked = msgspec.structs.replace(CONFIG, **{name: 10**9 if name == "kv_cache_memory" else 10**6})
    with pytest.raises(ConfigError, match=f"{name} is 10+,") as caught:
        blocks_that_fit(asked, model)
    assert caught.value.code == "kv_too_large"
    most = int(re.findall(rf"Lower {name} to (\d+)", caught.value.fix)[0])
    fitting = msgspec.structs.replace(CONFIG, **{name: most})
    assert blocks_that_fit(fitting, model) >= 1


class Card:
    """A GPU whose memory is a number: what steps and graphs take of it is noted."""

    total = 1000 * MIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, integrated: bool = False) -> None:
        self.free = free
        self.left_by_steps = 0
        self.graphs: list[Any] = []
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        properties = SimpleNamespace(is_integrated=integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(memory, "build", lambda rehearsal, device, key: rehearsal())
        monkeypatch.setattr(graphs.DecodeGraphs, "serve", staticmethod(lambda model: True))
        card = self

        class Counting(Repeater):
            """The first graph of each sort takes 50 MiB, and each one 3 more; what steps have left is given back."""

            def __call__(self, rehearse: graphs.GraphBody, run: graphs.GraphBody) -> graphs.Recorded:
                card.free, card.left_by_steps = card.free + card.left_by_steps, 0
                card.free -= (50 if len(card.graphs) < 2 else 0) * MIB + 3 * MIB
                card.graphs.append(run)
                return super().__call__(rehearse, run)

        monkeypatch.setattr(graphs, "Recorder", Counting)
        rehearse = TorchRunner.rehearse

        def stepping(runner: TorchRunner, plan: Any, model: Decoder) -> None:
            if len(model.layers) == len(model.place.spec.layers):
                self.take(100 * MIB)
            rehearse(runner, plan, model)

        monkeypatch.setattr(TorchRunner, "rehearse", stepping)

    def take(self, size: int) -> None:
        if size > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 MiB.")
        self.free -= size
        self.left_by_steps += size


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_gives_what_a_step_and_all_graphs_leave(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    Card(monkeypatch, free=800 * MIB)
    room = memory._room_on_gpu(CONFIG, model, ranks)
    runner = TorchRunner(model, 16, 256, 200)
    further = (len(all_graphs(runner)) - 4) * 3 * MIB
    assert len(all_graphs(runner)) > 20
    left = (800 - 100 - 2 * 50 - 4 * 3 - 10) * MIB
    assert room == left // ranks - further


@pytest.mark.parametrize(
    ("asked", "integrated", "kept"),
    [(None, False, 10), (None, True, 130), (0.9, True, 80), (0.5, False, 480), (0.98, False, 10)],
)
def test_a_share_of_the_memory_stays_free(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: float | None,
    integrated: bool,
    kept: int,
) -> None:
    """20 of 1000 MiB are others' already, and count as part of what is left to them."""
    Card(monkeypatch, free=980 * MIB, integrated=integrated)
    config = msgspec.structs.replace(CONFIG, gpu_memory_utilization=asked)
    room = memory._room_on_gpu(config, model, 1)
    further = (len(all_graphs(TorchRunner(model, 16, 256, 200))) - 4) * 3
    assert room == (980 - 100 - 2 * 50 - 4 * 3 - kept - further) * MIB
    assert bool(caplog.messages) == (asked == 0.9)


def test_more_memory_than_is_free_is_refused_with_what_is(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "OWN_CONTEXT", 0)
    Card(monkeypatch, free=600 * MIB)
    config = msgspec.structs.replace(CONFIG, gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match=r"use at most 0\.60") as caught:
        memory._room_on_gpu(config, model, 1)
    assert caught.value.code == "memory_in_use"


def test_on_a_cpu_the_share_is_of_the_machine(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    block = with_its_tokens(model)
    own = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=40 * block))
    monkeypatch.setattr(memory.psutil, "Process", lambda: own)
    machine = SimpleNamespace(available=900 * block, total=1000 * block)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    config = msgspec.structs.replace(CONFIG, gpu_memory_utilization=0.1)
    assert blocks_that_fit(config, model) == 60


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_beyond_all_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_a_gpu_too_full_for_the_worst_step_says_which_limit_to_lower(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(monkeypatch, free=99 * MIB)
    with pytest.raises(ConfigError, match="99 MiB are left on rank 0 for a step of 256 tokens") as caught:
        memory._room_on_gpu(CONFIG, model, 1)
    assert caught.value.code == "step_too_large"
    lowered = re.findall(r"Lower max_num_batched_tokens to (\d+)", caught.value.fix)
    assert int(lowered[0]) < 256


def test_other_errors_of_the_worst_step_are_told_as_they_are(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=800 * MIB)

    def broken(size: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(card, "take", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        memory._room_on_gpu(CONFIG, model, 1)
