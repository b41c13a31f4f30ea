"""What quantising costs, against the same numbers from transformers, sacrebleu and rouge-score."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from phalanx.bench.quality import Comparison, QualityReport, compare_checkpoints, read_prompts
from phalanx.bench.quality.measures import Seen, figures, look
from phalanx.bench.quality.overlap import overlap
from phalanx.cli import app
from phalanx.errors import ConfigError
from tests.conftest import make_checkpoint
from tests.server.conftest import add_tokenizer

PROMPTS = [
    "Phalanx plans tensor-parallel deployments.",
    "A rank is a process that holds a share of the model.",
    "Blocks of keys and values.",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with a little noise on its weights. It looks back on windows in some layers."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second") / "noisy"
    make_checkpoint("gemma3_text", first)
    add_tokenizer(first)
    shutil.copytree(first, second)
    file = next(second.glob("*.safetensors"))
    weights, chance = load_file(file), torch.Generator().manual_seed(1)
    noisy = {name: w + 0.02 * torch.randn(w.shape, generator=chance).to(w.dtype) for name, w in weights.items()}
    save_file(noisy, file, {"format": "pt"})
    return first, second


@pytest.fixture(scope="module")
def report(folders: tuple[Path, Path]) -> QualityReport:
    return compare_checkpoints(Comparison(*map(str, folders), answer_tokens=12), list(PROMPTS))


def by_transformers(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    with torch.inference_mode():
        return [(tokens, model(torch.tensor([tokens])).logits[0]) for tokens in told]


def test_the_numbers_are_those_of_transformers(folders: tuple[Path, Path], report: QualityReport) -> None:
    ours, theirs = (by_transformers(folder) for folder in folders)
    losses = [
        torch.cat([torch.nn.functional.cross_entropy(s[:-1], torch.tensor(t[1:]), reduction="none") for t, s in each])
        for each in (ours, theirs)
    ]
    one, other = (torch.cat([scores[:-1] for _, scores in each]).log_softmax(-1) for each in (ours, theirs))
    divergence = torch.nn.functional.kl_div(other, one, log_target=True, reduction="batchmean")
    expected = {
        "first_perplexity": losses[0].mean().exp(),
        "second_perplexity": losses[1].mean().exp(),
        "perplexity_ratio": (losses[1].mean() - losses[0].mean()).exp(),
        "top_1_agreement": (one.argmax(-1) == other.argmax(-1)).float().mean(),
        "kl_nats": divergence,
    }
    assert report.tokens == len(losses[0])
    for name, value in expected.items():
        figure = report.figures[name]
        assert figure.value == pytest.approx(value.item(), rel=1e-3), name
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
    assert expected["kl_nats"] > 1e-4


def test_a_model_is_itself(folders: tuple[Path, Path]) -> None:
    same = compare_checkpoints(Comparison(str(folders[0]), str(folders[0]), answer_tokens=8), list(PROMPTS))
    found = {name: figure.value for name, figure in same.figures.items()}
    assert found["top_1_agreement"] == found["perplexity_ratio"] == pytest.approx(1)
    assert found["kl_nats"] == pytest.approx(0, abs=1e-9)
    assert found["rouge_l"] == pytest.approx(1)
    assert same.same_answers == len(PROMPTS)


def test_overlap_is_that_of_the_papers_tools() -> None:
    first, second = ["the cat sat on the mat", "a b c d e"], ["the cat is on the mat", "a b c d e"]
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    found = overlap(first, second)
    assert found["bleu"].value == pytest.approx(sacrebleu.corpus_bleu(second, [first]).score)
    rouge = RougeScorer(["rougeL"]).score(first[0], second[0])["rougeL"].fmeasure
    assert found["rouge_l"].value == pytest.approx((rouge + 1) / 2)


def test_intervals_hold_the_mean_of_what_was_drawn_from() -> None:
    """Of many texts whose agreement is 0.7 on average, nineteen of twenty intervals hold it."""
    chance = torch.Generator().manual_seed(3)
    held = 0
    for _ in range(40):
        agreed = torch.binomial(torch.full((60,), 20.0), torch.tensor(0.7).expand(60), generator=chance)
        low, high = figures([Seen(20, 40, 41, each, 1) for each in agreed.tolist()])["top_1_agreement"][1:]
        assert low is not None
        assert high is not None
        held += low <= 0.7 <= high
    assert 34 <= held <= 40


def test_one_text_alone_has_no_interval() -> None:
    assert figures([Seen(10, 20, 21, 9, 0.1)])["kl_nats"] == (pytest.approx(0.01), None, None)


def test_a_token_that_cannot_be_counts_for_nothing() -> None:
    scores = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]])
    assert look(scores, scores, [0, 1]).divergence == 0


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.txt", "one\n\n two\n", ["one", " two"]),
        ("a.jsonl", '{"prompt": "x"}\n{"messages": [{"role": "user", "content": "y"}]}\n', None),
    ],
)
def test_prompts_are_read_line_by_line(tmp_path: Path, name: str, text: str, found: Any) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_prompts(file) == (found or ["x", [{"role": "user", "content": "y"}]])
    file.write_text('{"nothing": 1}\n' if name.endswith("l") else "\n\n")
    with pytest.raises(ConfigError, match=r"Line 1 has no prompt|has no prompt"):
        read_prompts(file)


def test_the_commands_tell_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    words = ["compare", *map(str, folders), "--prompts", str(prompts), "--tokens", "0", "--json"]
    told = json.loads(CliRunner().invoke(app, words).stdout)
    assert told["kl_nats"]["value"] > 0
    assert "bleu" not in told
    plain = tmp_path / "plain"
    make_checkpoint("llama", plain)
    add_tokenizer(plain)
    quantised = ["quantize", str(plain), "--output", str(tmp_path / "fp8"), "--format", "fp8-channel"]
    ran = CliRunner().invoke(app, [*quantised, "--check", str(prompts), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert 0.1 < told["check"]["top_1_agreement"]["value"] < 1
    assert 0 < told["check"]["kl_nats"]["value"] < 1


def test_models_with_other_tokens_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders[0], other)
    told = json.loads((other / "tokenizer.json").read_text())
    told["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="the same tokens"):
        compare_checkpoints(Comparison(str(folders[0]), str(other), answer_tokens=0), list(PROMPTS))
