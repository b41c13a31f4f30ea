"""How much two models' answers have in common, by the tools that papers use: sacrebleu and rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from phalanx.bench.quality.measures import Figure, draws, interval

_RESAMPLES = 100
"""Every one is a whole corpus to sacrebleu."""


def overlap(first: Sequence[str], second: Sequence[str]) -> dict[str, Figure]:
    """BLEU of the second's answers against the first's (0 to 100) and ROUGE-L's F (0 to 1)."""
    return {"bleu": _bleu(first, second), "rouge_l": _rouge(first, second)}


def _bleu(first: Sequence[str], second: Sequence[str]) -> Figure:
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)

    def score(places: Sequence[int]) -> float:
        return metric.corpus_score([second[place] for place in places], [[first[place] for place in places]]).score

    drawn = [score(places) for places in draws(len(first), _RESAMPLES).tolist()] if len(first) > 1 else []
    return interval(score(range(len(first))), drawn)


def _rouge(first: Sequence[str], second: Sequence[str]) -> Figure:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    each = [_shared(scorer.score(one, other)["rougeL"].fmeasure, one, other) for one, other in _pairs(first, second)]
    drawn = [fmean(each[place] for place in places) for places in draws(len(each)).tolist()] if len(each) > 1 else []
    return interval(fmean(each), drawn)


def _pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(first, second, strict=True))


def _shared(score: float, one: str, other: str) -> float:
    """Answers without a word of letters and digits have no ROUGE: the same ones agree all the same."""
    return 1.0 if one == other else score
