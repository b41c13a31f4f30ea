"""Tokens a second with drafts and without: `python benchmarks/speculation.py [MODEL]`. Answers must be the same.

Texts that repeat are those that people have a model edit or continue: a file with one change, a log, a table. Texts
that do not are stories, drawn at random. Each is answered in turns, with and without, and the best run of each counts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from phalanx import LLM, SamplingParams
from phalanx.engine.ngram import NgramDrafter
from phalanx.engine.scheduler import Scheduler

LOG = "".join(
    f"2026-11-{day:02} 06:{minute:02}:00 INFO worker-{minute % 4} finished job {day * 100 + minute} in 0.{minute}s\n"
    for day in range(1, 4)
    for minute in range(10, 22)
)
CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def subtract(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def scale(self, factor):
        return Point(self.x * factor, self.y * factor)
"""
TABLE = "| day | orders | returns |\n|---|---|---|\n" + "".join(
    f"| {day} | {day * 17} | {day % 5} |\n" for day in range(1, 30)
)


@dataclass(frozen=True)
class Text:
    name: str
    prompt: str
    repeats: bool
    temperature: float = 0.0


TEXTS = [
    Text("continue this log", LOG, repeats=True),
    Text("edit this file", f"Rename Point to Vector in this file:\n{CODE}\nThe whole file:\n{CODE[:30]}", repeats=True),
    Text("continue this table", TABLE, repeats=True),
    Text("a story", "Once upon a time in a village by the sea", repeats=False, temperature=1.0),
    Text("an explanation", "Photosynthesis is the process by which", repeats=False, temperature=1.0),
]


def timed(llm: LLM, text: Text, tokens: int, batch: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=text.temperature, max_tokens=tokens, ignore_eos=True, seed=1)
    llm.generate([text.prompt] * batch, SamplingParams(max_tokens=1))
    began = time.perf_counter()
    found = llm.generate([text.prompt] * batch, params)
    return time.perf_counter() - began, [answer.token_ids for answer in found]


def compare(llm: LLM, text: Text, tokens: int, batch: int, runs: int) -> str:
    scheduler: Scheduler = llm.engine.scheduler
    speculation = scheduler.speculation
    assert speculation is not None
    best = {"off": float("inf"), "on": float("inf")}
    answers = {}
    before = (speculation.totals.draft_tokens, speculation.totals.accepted_tokens)
    for _ in range(runs):
        for way, used in (("off", None), ("on", speculation)):
            scheduler.speculation = used
            if isinstance(speculation._drafter, NgramDrafter):
                speculation._drafter = NgramDrafter()  # it would know the answer from the last run
            seconds, answers[way] = timed(llm, text, tokens, batch)
            best[way] = min(best[way], seconds)
    scheduler.speculation = speculation
    drafted = speculation.totals.draft_tokens - before[0]
    accepted = speculation.totals.accepted_tokens - before[1]
    rates = {way: batch * tokens / seconds for way, seconds in best.items()}
    same = "yes" if answers["on"] == answers["off"] else "NO"
    share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "none"
    return (
        f"| {text.name} | {batch} | {rates['off']:.1f} | {rates['on']:.1f} | {rates['on'] / rates['off']:.2f} "
        f"| {share} | {same} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    print("| text | requests | off, tok/s | on, tok/s | ratio | drafts that came true | same tokens |")
    print("|---|---|---|---|---|---|---|")
    with LLM(asked.model, tp=asked.tp, progress=False, speculate="ngram") as llm:
        for batch in asked.batches:
            for text in TEXTS:
                print(compare(llm, text, asked.tokens, batch, asked.runs), flush=True)


if __name__ == "__main__":
    main()
