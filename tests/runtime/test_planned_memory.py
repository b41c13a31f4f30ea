"""What the planner counts is what a rank allocates: blocks by group, states, their snapshots and their twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from phalanx.fabric.emulated import EmulatedGroup
from phalanx.layers.decoder import Decoder
from phalanx.layers.mixers import delta
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, cache_layout, load_model, make_runner
from phalanx.runtime.speculate import open_checkpoint
from phalanx.spec.delta import updates_beside
from phalanx.spec.machine import Machine
from tests.conftest import Reference
from tests.heads import HeadReference

BLOCKS, LONGEST = 60, 320
CASES = [
    ("qwen3_5_text", "off"),
    ("qwen3_5_text", "mtp"),
    ("qwen3_5_text in bf16", "off"),
    ("deepseek_v3", "off"),
    ("deepseek_v3", "mtp"),
    ("gpt_oss", "off"),
    ("gemma3_text", "off"),
    ("mistral", "off"),
]


def caches(model: Decoder) -> Iterator[torch.Tensor]:
    for layer in model.all_layers:
        parts = (layer.mixer, getattr(layer.mixer, "indexer", None))
        yield from (part.cache for part in parts if hasattr(part, "cache"))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "speculate"), CASES)
def test_a_rank_allocates_what_the_plan_counts(
    name: str,
    speculate: str,
    tp: int,
    references: Callable[[str], Reference],
    heads: Callable[[str], HeadReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bf16, which plans are made in, on rank 0 of `tp`, and what a GPU keeps beside states."""
    monkeypatch.setattr(delta, "_updates_kept", lambda record, device: updates_beside(max(1, record.pending)))
    name, _, state_dtype = name.partition(" in ")
    folder = heads(name).folder if speculate == "mtp" else references(name).folder
    limits = {"max_num_seqs": 5, "max_model_len": LONGEST}
    kinds = {"dtype": "bf16", "state_dtype": state_dtype or "auto", "load_format": "dummy"}
    config = EngineConfig(speculate=speculate, **kinds, **limits)
    group = EmulatedGroup(tp, lambda size: 0.0, torch.device("cpu"))
    model = load_model(config, open_checkpoint(config, folder), group, lambda done, total: None)
    make_runner(config, model, Sizes(BLOCKS, LONGEST))
    spec, layout, size = model.place.spec, model.place.layout, model.block_size

    memory = {cache.data_ptr(): cache.nbytes for cache in caches(model) if cache.nbytes}
    assert sum(memory.values()) == (BLOCKS + 1) * layout.block_bytes(0, size)

    planned = fit(spec, Machine.parse(f"{tp}xH200"), tp, ENGINES["phalanx"], context=LONGEST)
    need = cache_layout(config, spec, LONGEST).need(LONGEST // size, size)
    blocks = need.windows + (need.whole if spec.keeps_all_tokens else 0)
    states = sum(state.nbytes for layer in model.all_layers for state in layer.mixer.states())
    spare = sum(-line.bytes for line in planned.ranks[0].lines if line.what == "a spare state")
    assert bool(states) == bool(spare) == spec.has_states
    of_sequence = blocks * layout.block_bytes(0, size) + (states - spare) / config.max_num_seqs
    rounded = len(spec.window_groups) * layout.block_bytes(0, size)
    assert planned.kv_bytes_per_token * LONGEST == pytest.approx(of_sequence, abs=max(rounded, 1))
