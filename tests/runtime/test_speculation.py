"""Drafts change no token and no log-probability, whoever makes them and however many of them come true."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from phalanx.engine.ngram import FAMILIES, MOST_REMEMBERED, NgramDrafter
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.speculation import Drafter, RankDrafter, Speculation
from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.drafting import HeadGuesser
from tests.conftest import LOGIT_NOISE, Reference
from tests.drafts import Answer, Knowing, Known, Rememberer, answers_of
from tests.heads import LAST_LAYER, HeadReference
from tests.threaded_ranks import ThreadedEngine

Heads = Callable[[str], HeadReference]


class Compared:
    """An engine under pressure, in chunks, with cached prefixes and preemption: its answers without drafts and with."""

    def __init__(self, folder: Path, prompts: list[list[int]], tp: int, drafts_by: str, caching: bool = True) -> None:
        self.threaded, self.prompts = ThreadedEngine(folder, tp, caching, drafts_by, max_num_seqs=24), prompts
        self.scheduler = self.threaded.engine.scheduler
        self.scheduler.speculation = None
        self.plain = answers_of(self.threaded, prompts)
        self.known: Known = {tuple(prompt): answer for prompt, (answer, _) in zip(prompts, self.plain, strict=True)}

    def check(self, drafter: Drafter, most: int, right: float) -> None:
        self.scheduler.speculation = speculation = Speculation(drafter, most)
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        if speculation.by_ranks:
            self._let_ranks_know(right)
            numbers = count()
            speculation.ahead = lambda requests: 1 + next(numbers) % most  # type: ignore[method-assign]
        self._check_same(answers_of(self.threaded, self.prompts))
        totals = speculation.totals
        assert totals.drafts > 10
        assert (totals.accepted_tokens > 0) == (right > 0)
        assert (totals.accepted_tokens == totals.draft_tokens) == (right == 1)

    def _let_ranks_know(self, right: float) -> None:
        for runner in self.threaded.runner.ranks:
            assert runner.drafting is not None
            runner.drafting._guesser = Knowing(runner.drafting._guesser, self.scheduler, self.known, right)

    def _check_same(self, found: list[Answer]) -> None:
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in self.plain]
        for (_, told), (_, wanted) in zip(found, self.plain, strict=True):
            assert told == [score if score is None else pytest.approx(score, abs=LOGIT_NOISE) for score in wanted]


def test_answers_are_the_same_with_drafts_and_without(reference: Reference, heads: Heads, companion: Path) -> None:
    """By a drafter that is mostly right, and by ranks that are right at times."""
    has_head = reference.name in LAST_LAYER
    folder = heads(reference.name).folder if has_head else reference.folder
    compared = Compared(folder, reference.prompts, 1, "mtp" if has_head else str(companion))
    compared.check(Rememberer(compared.known, 0.85), most=8, right=0.85)
    compared.check(RankDrafter(), most=8, right=0.7)
    compared.threaded.close()


@pytest.mark.parametrize("name", ["qwen3_5_text", "gemma3_text"])
def test_drafts_may_be_always_right_or_always_wrong(name: str, references: Callable[[str], Reference]) -> None:
    """Where there is a state to go back to, and where there are windows."""
    reference = references(name)
    compared = Compared(reference.folder, reference.prompts, 1, "ngram")
    compared.check(Rememberer(compared.known, 1.0), most=8, right=1.0)
    compared.check(Rememberer(compared.known, 0.0), most=1, right=0.0)
    compared.threaded.close()


@pytest.mark.parametrize(("name", "tp"), [("deepseek_v32", 2), ("qwen3_next", 3), ("llama3_rope", 2)])
def test_ranks_agree_on_drafts(
    name: str, tp: int, references: Callable[[str], Reference], heads: Heads, companion: Path
) -> None:
    has_head = name in LAST_LAYER
    folder = heads(name).folder if has_head else references(name).folder
    compared = Compared(folder, references(name).prompts[2:5], tp, "mtp" if has_head else str(companion))
    compared.check(Rememberer(compared.known, 0.8), most=6, right=0.8)
    compared.check(RankDrafter(), most=4, right=0.8)
    compared.threaded.close()


@pytest.mark.parametrize("name", ["qwen3_5_text", "deepseek_v3", "glm4_moe"])
def test_a_head_that_was_given_up_rests_and_changes_no_answer(
    name: str, references: Callable[[str], Reference], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are made for some steps, and then for none, in turns: new prompts have drafts again, also behind cached
    prefixes of which the head has missed a part.
    """
    monkeypatch.setattr("phalanx.engine.speculation.PATIENCE", 3)
    compared, plans, taken_in = Compared(heads(name).folder, references(name).prompts, 1, "mtp"), [], []
    compared.scheduler.speculation = speculation = Speculation(RankDrafter(), 4)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    numbers = count()
    speculation.ahead = lambda requests: 2 if next(numbers) % 16 < 4 else 0  # type: ignore[method-assign]
    compared._let_ranks_know(0.2)
    runner = compared.threaded.runner
    launch, take_in = runner.launch, HeadGuesser.take_in
    monkeypatch.setattr(runner, "launch", lambda plan: (plans.append(plan), launch(plan)))
    monkeypatch.setattr(HeadGuesser, "take_in", lambda self, step: (taken_in.append(step), take_in(self, step)))
    for _ in range(2):
        compared._check_same(answers_of(compared.threaded, compared.prompts))
    assert len(taken_in) == sum(plan.taken_in for plan in plans) < 0.9 * len(plans)
    assert 0 < speculation.totals.accepted_tokens < speculation.totals.draft_tokens
    compared.threaded.close()


def test_a_model_that_drafts_for_itself_is_always_right(references: Callable[[str], Reference]) -> None:
    """Drafts are drawn with the numbers that the answer is drawn with, and touch no block of anybody else."""
    reference = references("qwen2")
    compared = Compared(reference.folder, reference.prompts[2:4], 1, str(reference.folder), caching=False)
    compared.scheduler.speculation = speculation = Speculation(RankDrafter(), 5)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation.ahead = lambda requests: 5  # type: ignore[method-assign]
    _check_blocks(compared)
    compared._check_same(answers_of(compared.threaded, compared.prompts))
    totals = speculation.totals
    assert totals.accepted_tokens == totals.draft_tokens > 20
    compared.threaded.close()


def _check_blocks(compared: Compared) -> None:
    """From here on every step is held to the blocks that requests have, and the spare one."""
    runner, launch = compared.threaded.runner, compared.threaded.runner.launch
    companion = runner.ranks[0].model.companion
    assert companion is not None
    kept = companion.layers[0].mixer

    def checked(plan: StepPlan) -> None:
        before = kept.cache.clone()
        launch(plan)
        changed = (kept.cache != before).flatten(1).any(1).nonzero()[:, 0].tolist()
        held = {block for request in compared.scheduler.running for block in request.blocks}
        assert set(changed) <= held | {companion.spare_block}

    runner.launch = checked  # type: ignore[method-assign]


def drafts_behind(tokens: list[int], most: int = 8) -> list[int]:
    return NgramDrafter().propose(Request(1, tokens, SamplingParams(), 0, None), most)


def test_what_repeats_is_found() -> None:
    drafter, text = NgramDrafter(), [5, 6, 7, 8, 9, 5, 6, 7]
    request = Request(1, text, SamplingParams(), 0, None)
    assert drafter.propose(request, 4) == [8], "half as many drafts as tokens agree"
    request.tokens += [8, 9, 5, 6]
    assert drafter.propose(request, 4) == [7, 8, 9]
    assert drafter.propose(request, 2) == [7, 8]
    request.tokens += [1, 2, 3]
    assert drafter.propose(request, 4) == []
    drafter.forget(request)
    assert not drafter._indices
    assert drafts_behind([5, 6, 7, 8] * 4) == [5, 6, 7, 8, 5, 6], "a text that goes round goes on going round"


def test_drafts_end_where_places_disagree() -> None:
    line = [1, 2, 3, 4, 5, 6, 7]
    assert drafts_behind([*line, 20, *line, 21, *line[:5]]) == [6, 7]
    assert drafts_behind([*line, 20, *line, 21, *line]) == []
    beginning = list(range(100, 130))
    assert drafts_behind([*beginning, 5, 6, 7, 20, 5, 6, 7, 21, *beginning, 5, 6, 7], 2) == [20, 5], (
        "where far more agrees, others are not heard"
    )


def test_one_token_may_differ() -> None:
    """The next line of a log has another number in the same place, behind which it goes on as the others do."""
    line = [1, 2, 3, 4, 5]
    assert drafts_behind([*line, 20, 6, 7, 8, *line, 21, 6, 7, 8, *line, 22]) == [6, 7, 8, 1, 2, 3]
    assert drafts_behind([9, 3, 4, 5, 20, 6, 7, 9, 9, 3, 4, 5, 22]) == [], "behind a few tokens that says nothing"


def test_earlier_answers_of_the_same_family_are_found() -> None:
    drafter, begin = NgramDrafter(), list(range(100, 140))

    def ask(prompt: list[int], answer: list[int], salt: str | None = None) -> Request:
        request = Request(1, prompt, SamplingParams(), 0, salt)
        request.tokens += answer
        return request

    drafter.forget(ask([*begin, 1, 2, 3], [7, 8, 9, 10, 11]))
    assert drafter.propose(ask([*begin, 50, 1, 2, 3], []), 3) == [7, 8, 9], "what followed the same end of a prompt"
    assert drafter.propose(ask([*begin, 4, 5, 6], [60, 8, 9, 10]), 3) == [11]
    drafter.forget(ask([*begin, 1, 2, 3], [7, 8, 20]))
    assert drafter.propose(ask([*begin, 4, 5, 6], [3, 7, 8]), 1) == [20], "of several answers the last"
    assert drafter.propose(ask([*begin, 4, 5, 6], [3, 7, 8], salt="other"), 1) == [], "who shares no prefix has none"
    assert drafter.propose(ask([99, *begin, 4, 5, 6], [3, 7, 8]), 1) == [], "nor has who begins otherwise"
    for number in range(FAMILIES):
        drafter.forget(ask([number, 1, 2, 3], [5] * 5000))
    assert drafter.propose(ask([*begin, 4, 5, 6], [3, 7, 8]), 1) == [], "in time it is forgotten"
    assert len(drafter._families) == FAMILIES
    kept = [len(each._tokens) for answers in drafter._families.values() for each in answers]
    assert max(kept) == MOST_REMEMBERED
