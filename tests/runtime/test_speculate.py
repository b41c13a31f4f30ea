"""Who drafts: what a checkpoint has, what is refused and what to do then; and that drafts bend no probability."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine.ngram import NgramDrafter
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import ConfigError, ModelError
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.speculate import open_checkpoint, settle, speculation
from tests.conftest import Reference, tiny_config
from tests.heads import HeadReference
from tests.threaded_ranks import ThreadedEngine

VOCAB, DRAWS = 8, 20_000
LIKELY = {VOCAB - 1: 24.3, VOCAB * VOCAB - 1: 103.4}
"""Chi-squares that one in a thousand samples exceeds, by degrees of freedom."""


def test_auto_takes_the_head_where_there_is_one(
    references: Callable[[str], Reference], heads: Callable[[str], HeadReference]
) -> None:
    with_head, without = heads("qwen3_5_text").folder, references("qwen3_5_text").folder
    for folder, asked, by_ranks in [
        (with_head, "auto", True),
        (with_head, "mtp", True),
        (with_head, "ngram", False),
        (without, "auto", False),
    ]:
        config = settle(EngineConfig(speculate=asked), folder)
        checkpoint = open_checkpoint(config, folder)
        found = speculation(config, checkpoint)
        assert found is not None
        assert found.by_ranks == checkpoint.spec.drafts == by_ranks
        assert isinstance(found._drafter, NgramDrafter) != by_ranks
        reader = checkpoint.open_reader(torch.device("cpu"))
        assert not reader.unknown()  # type: ignore[attr-defined]


def refusal(folder: Path, **asked: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        settle(EngineConfig(**asked), folder)
    return refused.value


def test_a_head_that_is_not_there_is_refused(references: Callable[[str], Reference], tiny_llama: Path) -> None:
    for folder, told in ((references("qwen3_5_text").folder, "files lack"), (tiny_llama, "config.json tells of none")):
        refused = refusal(folder, speculate="mtp")
        assert refused.code == "no_draft_head"
        assert told in refused.found
        assert "ngram" in refused.fix


def test_draft_models_that_cannot_draft_are_refused(
    references: Callable[[str], Reference], tiny_llama: Path, companion: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(companion, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    refused = refusal(tiny_llama, speculate=str(other))
    assert refused.code == "other_vocabulary"
    assert "300 tokens and the model has 512" in refused.found
    assert "same tokens" in refused.fix
    assert refusal(tiny_llama, speculate=str(references("qwen3_next").folder)).code == "unsupported_draft_model"
    with_few_heads = references("mixtral").folder
    assert "heads" in refusal(tiny_llama, speculate=str(with_few_heads), tp=5).found
    for asked in ("", "MTP"):
        assert "off, auto, ngram, mtp" in refusal(tiny_llama, speculate=asked).fix
    with_latents = shutil.copytree(references("deepseek_v3").folder, tmp_path / "with_latents")
    config = json.loads((with_latents / "config.json").read_text())
    (with_latents / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    settle(EngineConfig(speculate=str(with_latents)), tiny_llama)
    refused = refusal(tiny_llama, speculate=str(with_latents), invariant=True)
    assert refused.code == "draft_model_ranks"
    assert "The draft model with_latents cannot be dealt" in refused.found
    with pytest.raises(ModelError, match="ngrams is neither a folder"):
        settle(EngineConfig(speculate="ngrams"), tiny_llama)


def test_tokenizers_are_compared_where_there_are_some(tiny_llama: Path, companion: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folders = [shutil.copytree(source, tmp_path / source.name) for source in (tiny_llama, companion)]
    words = {f"w{number}": number for number in range(500)}
    for folder in folders:
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settle(EngineConfig(speculate=str(folders[1])), folders[0])
    words["w7"], words["w8"] = 8, 7
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folders[1] / "tokenizer.json"))
    assert "of which 2 are not the model's" in refusal(folders[0], speculate=str(folders[1])).found


@pytest.mark.parametrize(
    ("seqs", "tokens", "fix"),
    [(4, 4, "at most 3. For up to 8, raise max_num_seqs"), (64, 9, "at most 8."), (1, None, "max_num_seqs 2 or more")],
)
def test_drafts_that_no_batch_holds_are_refused(seqs: int, tokens: int | None, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(speculate="ngram", max_num_seqs=seqs, speculate_tokens=tokens)
    assert refused.value.code == "too_many_drafts"
    assert fix in refused.value.fix


def test_a_number_of_drafts_without_any_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculate is off"):
        EngineConfig(speculate_tokens=3)


def test_as_many_drafts_as_fit_are_taken_where_none_is_said() -> None:
    assert EngineConfig(speculate="auto", max_num_seqs=4).most_drafts == 3
    assert EngineConfig(speculate="auto").most_drafts == 8


def of_one_mind(folder: Path, whim: float) -> Tensor:
    """A model that makes the same of every context. Its logits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = tiny_config(
        "llama", vocab_size=VOCAB, hidden_size=36, num_hidden_layers=1, head_dim=8, intermediate_size=32
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.ones(VOCAB, 1) * torch.randn(36)
    tensors["lm_head.weight"] = 0.2 * torch.randn(VOCAB, 36) + whim * torch.randn(VOCAB, 36)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        return model(torch.tensor([[1, 5, 2]])).logits[0, -1]


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    total = counts.total()
    return sum((counts[each] - total * share) ** 2 / (total * share) for each, share in expected.items())


def test_drafts_bend_no_probability(tmp_path: Path) -> None:
    """Of single tokens and of pairs, drafted by a model of another mind with the same random numbers."""
    logits = of_one_mind(tmp_path / "model", 0.0)
    of_one_mind(tmp_path / "draft", 0.05)
    threaded = ThreadedEngine(
        tmp_path / "model",
        speculate=str(tmp_path / "draft"),
        max_num_seqs=640,
        max_num_batched_tokens=640,
        num_blocks=128 * 12,
        block_size=16,
        max_model_len=180,
    )
    engine = threaded.engine
    guessing = engine.scheduler.speculation
    assert guessing is not None
    guessing._wants_plain = lambda rows: False  # type: ignore[method-assign]
    guessing.ahead = lambda requests: 4  # type: ignore[method-assign]
    guessing._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    requests = [
        engine.add([1, 5, 2], SamplingParams(max_tokens=-(-DRAWS // 128), temperature=0.9, seed=seed))
        for seed in range(128)
    ]
    while engine.has_work:
        engine.step()
    threaded.close()
    share = guessing.totals.accepted_tokens / guessing.totals.draft_tokens
    assert 0.2 < share < 0.9
    chances = torch.softmax(logits.double() / 0.9, -1).tolist()
    tokens = Counter(token for request in requests for token in request.output)
    assert tokens.total() >= DRAWS
    assert chi_square(tokens, dict(enumerate(chances))) < LIKELY[VOCAB - 1]
    pairs = Counter(
        pair for request in requests for pair in zip(request.output[::2], request.output[1::2], strict=False)
    )
    joint = {(one, two): chances[one] * chances[two] for one in range(VOCAB) for two in range(VOCAB)}
    assert chi_square(pairs, joint) < LIKELY[VOCAB * VOCAB - 1]
