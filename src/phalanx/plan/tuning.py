"""Levers in the order that pays: each is pulled to where it helps most, on top of those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.cost.rules import AdmissionRule
from phalanx.engine.defaults import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

WORTH = 1.02
"""A lever that brings less is left where it was."""


@dataclass(frozen=True)
class Setting:
    """How a model is served: `replicas` engines of `tp` ranks. `static` batches exist in virtual time alone."""

    tp: int = 1
    replicas: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    prefix_caching: bool = False
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    admission: AdmissionRule = "fair"
    speculate: str = "off"


@dataclass(frozen=True)
class Value:
    """Output tokens a second of all replicas at `rate` requests a second, the most that the SLO allows; seconds to the
    first token and between tokens there, the mean; and the share of prompts that was cached. `problem`: why it is none.
    """

    goodput: float
    rate: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    hits: float = 0.0
    problem: str = ""


Judge = Callable[[Setting], Value]


@dataclass(frozen=True)
class Lever:
    """`ways` are the settings to choose among, made from the one before."""

    name: str
    ways: Callable[[Setting], Sequence[Setting]]


@dataclass(frozen=True)
class Rung:
    """What a lever came to: the setting then, its value, and which setting it was before. Of several ways, `tried`."""

    lever: str
    setting: Setting
    value: Value
    tried: int = 1

    def gain(self, before: Rung) -> float:
        return self.value.goodput / before.value.goodput if before.value.goodput else float("inf")


def climb(
    start: Setting, levers: Sequence[Lever], judge: Judge, tell: Callable[[str], None], worth: float = WORTH
) -> list[Rung]:
    """The start, and one rung for each lever that had a choice; those that bring nothing worth it change nothing."""
    rungs = [Rung("start", start, judge(start))]
    for lever in levers:
        here = rungs[-1]
        ways = [way for way in lever.ways(here.setting) if way != here.setting]
        if not ways:
            continue
        best = here
        for way in ways:
            tell(f"{lever.name}: {difference(here.setting, way)}")
            found = Rung(lever.name, way, judge(way), len(ways))
            if found.value.goodput > max(best.value.goodput, worth * here.value.goodput):
                best = found
        rungs.append(replace(best, lever=lever.name, tried=len(ways)))
    return rungs


_WORDS = {
    "tp": "TP={}",
    "replicas": "{} replicas",
    "weights": "weights {}",
    "kv": "KV {}",
    "prefix_caching": "prefix caching {}",
    "max_num_seqs": "{} sequences",
    "max_num_batched_tokens": "{} tokens a step",
    "admission": "{} batches",
    "speculate": "speculation {}",
}


def difference(before: Setting, after: Setting) -> str:
    """What was changed, in words."""
    changed = [
        words.format(_said(getattr(after, name)))
        for name, words in _WORDS.items()
        if getattr(after, name) != getattr(before, name)
    ]
    return ", ".join(changed) or "as it was"


def _said(value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "continuous" if value == "fair" else value


def scheduling(most_seqs: int = 1024, most_tokens: int = 16384) -> list[Lever]:
    """How steps are filled."""

    def tokens(setting: Setting) -> list[Setting]:
        sizes = [size for size in (512, 1024, 2048, 4096, 8192, 16384) if size <= most_tokens]
        return [replace(setting, max_num_batched_tokens=max(size, setting.max_num_seqs)) for size in sizes]

    def sequences(setting: Setting) -> list[Setting]:
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if size <= most_seqs]
        budget = setting.max_num_batched_tokens
        return [
            replace(setting, max_num_seqs=size, max_num_batched_tokens=max(budget, size))
            for size in sizes
            if size >= most_seqs // 32
        ]

    return [
        Lever("continuous batching", lambda setting: [replace(setting, admission="fair")]),
        Lever("tokens a step", tokens),
        Lever("sequences at once", sequences),
    ]


def caching() -> Lever:
    return Lever("prefix caching", lambda setting: [replace(setting, prefix_caching=True)])


def precision(formats: Sequence[str], kv_formats: Sequence[str]) -> list[Lever]:
    """Fewer bits: other answers, which somebody has to judge."""
    return [
        Lever("weights", lambda setting: [replace(setting, weights=each) for each in formats]),
        Lever("KV cache", lambda setting: [replace(setting, kv=each) for each in kv_formats]),
    ]


def spread_out(splits: Sequence[tuple[int, int]]) -> Lever:
    """`splits` are (TP, replicas)."""
    return Lever(
        "TP x replicas", lambda setting: [replace(setting, tp=tp, replicas=replicas) for tp, replicas in splits]
    )
