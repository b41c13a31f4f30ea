"""Two checkpoints over the same texts: what each predicts at every position, and what each answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from phalanx.bench.quality.measures import Seen, figures, look
from phalanx.bench.quality.overlap import overlap
from phalanx.bench.quality.report import Prompt, QualityReport
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.errors import ConfigError
from phalanx.layers.decoder import Decoder
from phalanx.llm import LLM
from phalanx.runtime.runner import TorchRunner
from phalanx.text.tokenizer import Tokenizer

WINDOW = 512
"""Tokens that are looked at together: a longer text counts as several."""
_SEATS = 8


@dataclass(frozen=True)
class Comparison:
    """Which two, with how many tokens of each answer (0: none), at most so many windows of text."""

    first: str
    second: str
    answer_tokens: int = 64
    most_windows: int = 200
    dtype: str = "auto"


def compare_checkpoints(asked: Comparison, prompts: Sequence[Prompt]) -> QualityReport:
    """Both over the prompts: perplexity, agreement and KL of the prompts' tokens, overlap of the greedy answers."""
    with _open(asked, asked.first) as first, _open(asked, asked.second) as second:
        tokens = _same_tokens(first, second, prompts)
        answers = [_answers(llm, tokens, asked.answer_tokens) for llm in (first, second)] if asked.answer_tokens else []
        size = min(_window(first), _window(second))
        seen = _look_at(first, second, _windows(tokens, size)[: asked.most_windows])
    has_tools = find_spec("sacrebleu") is not None and find_spec("rouge_score") is not None
    found = figures(seen) | (overlap(*answers) if answers and has_tools else {})
    alike = sum(one == other for one, other in zip(*answers, strict=True)) if answers else None
    lacks = bool(answers) and not has_tools
    return QualityReport(
        asked.first, asked.second, len(prompts), sum(int(each.tokens) for each in seen), found, alike, lacks
    )


def _open(asked: Comparison, model: str) -> LLM:
    return LLM(
        model,
        progress=False,
        dtype=asked.dtype,
        prefix_caching=False,
        max_num_seqs=_SEATS,
        max_num_batched_tokens=WINDOW,
    )


def _same_tokens(first: LLM, second: LLM, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The prompts as tokens, which have to be the same for both, and two at least to predict one from the other."""
    ours, theirs = ([_encode(llm.tokenizer, prompt) for prompt in prompts] for llm in (first, second))
    if ours != theirs or _decoder(first).place.spec.vocab != _decoder(second).place.spec.vocab:
        raise ConfigError(
            "other_tokens",
            "The two models do not cut these texts into the same tokens: their probabilities cannot be compared.",
            "Compare checkpoints of one model.",
        )
    found = [tokens for tokens in ours if len(tokens) > 1]
    if not found:
        raise ConfigError("bad_text", "The texts have fewer than two tokens.", "Give a longer text.")
    return found


def _encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    if tokenizer is None:
        raise ConfigError("no_tokenizer", "The model has no tokenizer.", "Put its tokenizer.json beside the weights.")
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)


def _window(llm: LLM) -> int:
    """Tokens that a step, a sequence and the cache have room for."""
    model = _decoder(llm)
    room = model.spare_block // (1 + len(model.place.spec.window_groups)) * model.block_size
    return min(WINDOW, room, llm.engine.scheduler.limits.max_model_len)


def _windows(texts: Sequence[list[int]], size: int) -> list[list[int]]:
    """Texts cut to pieces that are looked at one by one, each of two tokens at least."""
    cut = [text[start : start + size] for text in texts for start in range(0, len(text), size)]
    return [window for window in cut if len(window) > 1]


def _answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    return [answer.text for answer in llm.generate(prompts, greedy)]


def _look_at(first: LLM, second: LLM, windows: Sequence[list[int]]) -> list[Seen]:
    return [look(logits(first, window), logits(second, window), window) for window in windows]


def _runner(llm: LLM) -> TorchRunner:
    runner = llm.engine.runner
    assert isinstance(runner, TorchRunner), "one rank, in this process"
    return runner


def _decoder(llm: LLM) -> Decoder:
    return _runner(llm).model


@torch.inference_mode()
def logits(llm: LLM, tokens: list[int]) -> Tensor:
    """At every position, in one step beside the engine, which must have nothing to do: the cache's first blocks are
    written over.
    """
    runner, model = _runner(llm), _decoder(llm)
    blocks = -(-len(tokens) // model.block_size)
    groups = len(model.place.spec.window_groups)
    plan = StepPlan(
        step=0,
        admissions=[Admission(0, len(tokens), tokens, 0, SamplingParams())],
        slots=[0],
        starts=[0],
        counts=[len(tokens)],
        samples=[0],
        new_blocks=[(0, list(range(blocks)))],
        window_blocks=[(0, group, list(range((1 + group) * blocks, (2 + group) * blocks))) for group in range(groups)],
    )
    inputs = runner.batch.prepare(plan)
    return model.scores(model(inputs.tokens, inputs.positions, inputs.attention))
