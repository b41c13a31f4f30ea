"""DeepSeek V4 beyond what all families are tested for: long prompts cut anywhere, every tensor alive, both namings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.errors import ConfigError, LayoutError
from phalanx.fabric.group import Solo
from phalanx.layers.decoder import Decoder
from phalanx.layers.mixers import compressed
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.spec import Layout
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import FAMILIES, Reference
from tests.kernels.apart import run_apart
from tests.layers.test_all_reduces import CountingGroup

CLOSE = 1e-4
HUB = [
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "embed."),
    ("model.norm.", "norm."),
    ("model.hc_head.hc_", "hc_head_"),
    (".attn.norm.", ".attn.kv_norm."),
]
"""What DeepSeek's own names have in the place of what transformers writes."""


@pytest.fixture(scope="module")
def v4(references: Callable[[str], Reference]) -> Reference:
    return references("deepseek_v4")


@pytest.fixture(scope="module")
def long_prompt(v4: Reference) -> tuple[list[int], Tensor]:
    """Many windows and many compressed entries long, and what transformers makes of it."""
    rng = random.Random(3)
    prompt = [rng.randrange(v4.model.config.vocab_size) for _ in range(211)]
    return prompt, v4.scores(prompt)


def loaded(folder: Path, **config: Any) -> Decoder:
    return load_model(EngineConfig(**config), Checkpoint(folder), Solo(), progress=lambda done, total: None)


def computed(folder: Path, prompt: list[int], chunks: list[int], block_size: int) -> Tensor:
    """Logits at every position of a prompt that is computed in these chunks, on blocks in no order."""
    model = loaded(folder)
    config = EngineConfig(max_num_seqs=2, block_size=block_size)
    blocks = random.Random(block_size).sample(range(64), -(-len(prompt) // block_size))
    runner = make_runner(config, model, Sizes(num_blocks=64, max_model_len=256))
    rows, start = [], 0
    for step, count in enumerate(chunks, 1):
        new = [Admission(0, len(prompt), prompt, 0, SamplingParams())] if start == 0 else []
        plan = StepPlan(step, new, [0], [start], [count], [0], [(0, blocks)] if new else [])
        with torch.inference_mode():
            inputs = runner.batch.prepare(plan)
            rows.append(runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention)))
        start += count
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("block_size", "chunk"),
    [(16, 211), (16, 130), (16, 37), (8, 13), (4, 6), (7, 11), (64, 19)],
)
def test_a_prompt_is_cut_anywhere(
    v4: Reference, long_prompt: tuple[list[int], Tensor], block_size: int, chunk: int
) -> None:
    """In the middle of windows, of compressed entries and of blocks, with lone tokens between."""
    prompt, wanted = long_prompt
    chunks = [chunk] * (len(prompt) // chunk)
    chunks = [1, *chunks[1:], chunk - 1, *([len(prompt) - sum(chunks)] if len(prompt) % chunk else [])]
    torch.testing.assert_close(computed(v4.folder, prompt, chunks, block_size), wanted, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("block_size", [16, 5])
def test_a_prompt_token_by_token(v4: Reference, long_prompt: tuple[list[int], Tensor], block_size: int) -> None:
    prompt, wanted = long_prompt[0][:50], long_prompt[1][:50]
    torch.testing.assert_close(computed(v4.folder, prompt, [1] * 50, block_size), wanted, atol=CLOSE, rtol=0)


def test_a_short_sequence_decodes_beside_a_long_one(v4: Reference, long_prompt: tuple[list[int], Tensor]) -> None:
    """It has fewer entries than are chosen, and looks at none of what lies in the other's blocks."""
    prompts = [long_prompt[0][:10], long_prompt[0][:91]]
    runner = make_runner(EngineConfig(max_num_seqs=2), loaded(v4.folder), Sizes(num_blocks=8, max_model_len=96))
    admissions = [Admission(slot, len(prompt), prompt, 0, SamplingParams()) for slot, prompt in enumerate(prompts)]
    blocks = [(0, [7]), (1, [0, 1, 2, 3, 4, 5])]
    with torch.inference_mode():
        for plan in (
            StepPlan(1, admissions, [0, 1], [0, 0], [9, 90], [0, 0], blocks),
            StepPlan(2, [], [0, 1], [9, 90], [1, 1], [1, 1], []),
        ):
            inputs = runner.batch.prepare(plan)
            hidden = runner.model(inputs.tokens, inputs.positions, inputs.attention)
    torch.testing.assert_close(runner.model.scores(hidden), long_prompt[1][[9, 90]], atol=CLOSE, rtol=0)


@pytest.mark.slow
def test_the_kernels_of_a_gpu_compute_the_whole_model(v4: Reference) -> None:
    """Prompts whole and cut, and rows of one token, in Triton's interpreter."""
    run_apart("interpreted_v4", str(v4.folder))


@pytest.mark.slow
def test_no_tensor_of_the_reference_is_inert(v4: Reference) -> None:
    """Each of one layer of every kind, and those of the whole: changed, it changes what the model says."""
    tokens, states = v4.prompts[-1], v4.model.state_dict()
    before = v4.scores(tokens)
    for name, tensor in states.items():
        if (".3." in name and "e_score" not in name) or (".1." in name and "attn" not in name):
            continue
        kept = tensor.clone()
        tensor.copy_(tensor.roll(1, 0) * 1.1 if tensor.is_floating_point() else tensor.roll(1, 0))
        assert (v4.scores(tokens) - before).abs().max() > 1e-3, name
        tensor.copy_(kept)
    assert torch.equal(v4.scores(tokens), before)


def test_rows_asked_for_have_the_experts_of_their_own_tokens(
    v4: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last layer too is routed by token, and only some rows go on behind its attention."""
    monkeypatch.setitem(FAMILIES, "hashed", FAMILIES[v4.name] | {"model_type": v4.name, "num_hash_layers": 4})
    hashed = Reference("hashed", tmp_path)
    group, config = CountingGroup(), EngineConfig(max_num_seqs=2)
    model = load_model(config, Checkpoint(tmp_path), group, progress=lambda done, total: None)
    runner = make_runner(config, model, Sizes(num_blocks=8, max_model_len=96))
    prompt, rows = hashed.prompts[-1], [3, 0, 56]
    admission = Admission(0, len(prompt), prompt, 0, SamplingParams())
    with torch.inference_mode():
        inputs = runner.batch.prepare(StepPlan(1, [admission], [0], [0], [len(prompt)], [0], [(0, [0, 1, 2, 3])]))
        hidden = model(inputs.tokens, inputs.positions, inputs.attention, torch.tensor(rows))
        torch.testing.assert_close(model.scores(hidden), hashed.logits[rows], atol=CLOSE, rtol=0)
    sums = [(len(prompt), model.place.spec.hidden)] * 6 + [(len(rows), model.place.spec.hidden)] * 2
    assert group.reduced == sums


def renamed(v4: Reference, folder: Path) -> Path:
    """Under DeepSeek's own names, with layers that draft tokens."""
    tensors = load_file(v4.folder / "model.safetensors")
    for ours, theirs in HUB:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    tensors["mtp.0.enorm.weight"] = torch.zeros(4)
    return written(v4, tensors, folder)


def written(v4: Reference, tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((v4.folder / "config.json").read_text())
    return folder


def test_a_checkpoint_loads_under_all_its_names(
    v4: Reference, long_prompt: tuple[list[int], Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As DeepSeek publishes it, and as transformers has it in memory, with stacked experts."""
    hub = renamed(v4, tmp_path_factory.mktemp("hub"))
    names = set(load_file(hub / "model.safetensors"))
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.hc_attn_base"} <= names
    assert {
        "layers.1.attn.kv_norm.weight",
        "layers.1.attn.indexer.compressor.ape",
        "layers.0.ffn.gate.tid2eid",
    } <= names
    held = written(v4, dict(v4.model.state_dict()), tmp_path_factory.mktemp("held"))
    prompt, wanted = long_prompt[0][:57], long_prompt[1][:57]
    for folder in (hub, held):
        torch.testing.assert_close(computed(folder, prompt, [57], 16), wanted, atol=CLOSE, rtol=0)


def test_heads_are_dealt_by_whole_groups_and_no_further(v4: Reference) -> None:
    spec = Checkpoint(v4.folder).spec
    assert [len(shard.query_heads) for shard in Layout(spec, 3).shards] == [6, 3, 3]
    with pytest.raises(LayoutError, match=r"4 groups of 3 query heads.*Use TP <= 4"):
        Layout(spec, 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_kept_is_what_the_planner_counts(v4: Reference, dtype: str) -> None:
    model = loaded(v4.folder, dtype=dtype)
    spec, wide = model.place.spec, {"float32": 2, "bfloat16": 1}[dtype]
    assert model.block_bytes(16) == 16 * wide * spec.kv_bytes_per_token()
    assert model.state_bytes_per_place == wide * sum(cache.state_bytes for cache in spec.caches)
    before = _held(model)
    model.allocate_cache(3, 8)
    assert _held(model) - before == 4 * model.block_bytes(8)
    model.allocate_states(5)
    assert _held(model) - before == 4 * model.block_bytes(8) + 5 * model.state_bytes_per_place


def _held(model: Decoder) -> int:
    """Bytes of all tensors of the mixers and their parts."""
    kinds = (type(model.layers[0].mixer), *vars(compressed).values())
    found: dict[int, int] = {}
    parts = [layer.mixer for layer in model.layers]
    while parts:
        part = parts.pop()
        found |= {id(each): each.nbytes for each in vars(part).values() if isinstance(each, Tensor)}
        parts += [each for each in vars(part).values() if type(each) in kinds]
    return sum(found.values())


@pytest.mark.parametrize(("block_size", "entries"), [(8, (2, 1)), (16, (4, 2)), (5, (2, 1)), (64, (16, 6))])
def test_a_block_has_an_entry_for_every_so_many_tokens(
    v4: Reference, block_size: int, entries: tuple[int, int]
) -> None:
    """Of 4 and of 12 tokens, whether these fill a block, do not, or take several."""
    model = loaded(v4.folder)
    assert model.block_bytes(block_size) == 4 * (2 * entries[0] * (32 + 16) + entries[1] * 32)


def test_bf16_says_nearly_what_transformers_says_in_bf16(
    v4: Reference, long_prompt: tuple[list[int], Tensor], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = written(v4, load_file(v4.folder / "model.safetensors"), tmp_path)
    told = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(told))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = long_prompt[0][:57]
    with torch.inference_mode():
        wanted = theirs(torch.tensor([prompt])).logits[0].float()
    found = computed(folder, prompt, [20, 37], 16).float()
    exact = long_prompt[1][:57]
    assert (found - exact).square().mean() < 1.5 * (wanted - exact).square().mean()


def test_an_fp8_cache_is_refused(v4: Reference) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        loaded(v4.folder, kv_cache_dtype="fp8")
