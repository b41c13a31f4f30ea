"""Contexts of millions of tokens: nothing but the table of blocks grows with how long a sequence may become."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import LOGIT_NOISE, Reference

SHORT, BLOCKS, BLOCK = 4_096, 16, 16
PROMPT, GREEDY = list(range(1, 50)), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 262_144}
LONG: dict[str, dict[str, Any]] = {
    "llama4_text": {"max_position_embeddings": 10_485_760},
    "qwen3_5_text": {
        "max_position_embeddings": 1_048_576,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    },
}
"""As Llama 4 Scout has it, and Qwen3.5 where it is stretched to a million."""


@pytest.fixture(scope="module", params=LONG)
def folder(
    request: pytest.FixtureRequest, references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model with the context of a large one."""
    folder = tmp_path_factory.mktemp("long") / request.param
    shutil.copytree(references(request.param).folder, folder)
    _change_config(folder, **LONG[request.param])
    return folder


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def storages(found: list[Any]) -> dict[int, int]:
    """Bytes by where they lie."""
    kept = [each.untyped_storage() for each in found if issubclass(type(each), Tensor) and each.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


class Made(TorchDispatchMode):
    """Bytes that operations make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = storages(tree_leaves((args, kwargs)))
        self.bytes += sum(size for place, size in storages(tree_leaves(result)).items() if place not in given)
        return result


def bytes_made(folder: Path) -> tuple[int, int]:
    """By the start of a rank, and by a step of a prompt and one of a token behind it."""
    config, checkpoint = EngineConfig(max_num_seqs=2, block_size=BLOCK), Checkpoint(folder)
    with Made() as at_start:
        model = load_model(config, checkpoint, Solo(), progress=lambda done, total: None)
        runner = make_runner(config, model, Sizes(BLOCKS, checkpoint.spec.max_positions))
    windows = [(0, group, list(range(4, 8))) for group in range(len(checkpoint.spec.window_groups))]
    admission, end = Admission(0, len(PROMPT), PROMPT, 0, GREEDY), len(PROMPT)
    with Made() as by_steps:
        for plan in (
            StepPlan(1, [admission], [0], [0], [end], [1], [(0, list(range(4)))], window_blocks=windows),
            StepPlan(2, [], [0], [end], [1], [1], []),
        ):
            runner.launch(plan)
            runner.collect()
    return at_start.bytes, by_steps.bytes


def test_a_rank_grows_by_the_table_of_blocks_and_its_steps_by_nothing(folder: Path, tmp_path: Path) -> None:
    """Four bytes a block, by slot and group of layers: no table of positions, of angles or of masks."""
    shorter = shutil.copytree(folder, tmp_path / "shorter")
    _change_config(shorter, max_position_embeddings=SHORT)
    short, long, spec = bytes_made(shorter), bytes_made(folder), Checkpoint(folder).spec
    blocks = (spec.max_positions - SHORT) // BLOCK
    assert long[0] - short[0] == 4 * blocks * (2 + 1) * (1 + len(spec.window_groups))
    assert long[1] == short[1] > 0


def test_a_long_context_starts_with_few_blocks_and_answers_as_a_short_one(folder: Path) -> None:
    """It is as long as there are blocks; the tokens are those of transformers."""
    answers, longest = [], []
    for limit in (None, 96):
        with LLM(folder, progress=False, num_blocks=BLOCKS, max_num_seqs=2, max_model_len=limit) as llm:
            answers.append(llm.generate(PROMPT, GREEDY).token_ids)
            longest.append(llm.engine.scheduler.limits.max_model_len)
    assert answers[0] == answers[1]
    assert BLOCKS * BLOCK >= longest[0] > longest[1] == 96
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        scores = model(torch.tensor([PROMPT + answers[0][:-1]])).logits[0, len(PROMPT) - 1 :]
    chosen = scores.gather(1, torch.tensor(answers[0])[:, None])[:, 0]
    assert bool((scores.amax(-1) - chosen <= LOGIT_NOISE).all())
