"""Whether drafts pay is found out by the clock, and what does not pay is left for longer and longer."""

from __future__ import annotations

import pytest

from phalanx.engine.speculation import RankDrafter, Speculation
from phalanx.engine.trials import BETWEEN, ENOUGH, LONGEST_REST, PLAIN_STEPS, REST, Trials

from .books import Guesser, greedy, make_engine

ANSWER, LONG = 500, 3000


def seconds(dear: float, by_ranks: bool, depth: int, is_blind: bool = False) -> float:
    """Of as many tokens in answers one after the other, whose every draft comes true, where steps with drafts take so
    many seconds and others one.

    The rule for single drafts may be blind to it.
    """
    drafter = RankDrafter() if by_ranks else Guesser(1.0)
    speculation = Speculation(drafter, 2)
    if is_blind:
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    engine, runner = make_engine(max_model_len=ANSWER + 8, num_blocks=ANSWER, depth=depth, speculation=speculation)
    runner._inner._price = lambda plan: dear if max(plan.samples) > 1 else 1.0
    runner.right = 1.0
    for _ in range(LONG // ANSWER):
        engine.add([1, 2, 3], greedy(ANSWER))
        while engine.has_work:
            engine.step()
    return runner.clock


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("by_ranks", [False, True])
def test_steps_that_are_dear_are_left(by_ranks: bool, depth: int) -> None:
    """Though all drafts come true: two more tokens, for four times the time."""
    assert seconds(4.0, by_ranks, depth) < 1.02 * LONG
    assert seconds(4.0, by_ranks, depth, is_blind=True) < 1.05 * LONG


def test_drafts_that_pay_are_hardly_ever_left_out() -> None:
    assert seconds(1.2, False, 1) < 1.07 * LONG * 1.2 / 2


def ask(trials: Trials, steps: int, pays: bool, rows: int = 4) -> list[bool]:
    """Whether each of so many steps had drafts: two tokens a row, in 1 second where they pay, else in 3."""
    had = []
    for _ in range(steps):
        had.append(not trials.wants_plain(rows))
        if had[-1]:
            trials.with_drafts(rows, 2 * rows, 1.0 if pays else 3.0)
        else:
            trials.without_drafts(rows, 1.0)
    return had


def test_a_verdict_takes_a_few_steps_and_each_rest_is_longer() -> None:
    trials = Trials()
    rests = [PLAIN_STEPS, REST, 2 * REST, 4 * REST]
    wanted = [had for rest in rests for had in [False] * rest + [True] * ENOUGH]
    assert ask(trials, len(wanted), pays=False) == wanted
    assert ask(trials, LONGEST_REST, pays=True)[-1], "in time they are tried again"


def test_what_pays_is_looked_at_again_and_begins_with_a_short_rest() -> None:
    trials = Trials()
    ask(trials, PLAIN_STEPS + ENOUGH + REST, pays=False)
    assert ask(trials, BETWEEN + PLAIN_STEPS + 1, pays=True) == [True] * BETWEEN + [False] * PLAIN_STEPS + [True]
    ask(trials, ENOUGH - 1, pays=False)
    assert ask(trials, REST + 1, pays=False) == [False] * REST + [True]


def test_other_sizes_are_tried_on_their_own_and_prompts_hold_no_trial_up() -> None:
    trials = Trials()
    ask(trials, PLAIN_STEPS + ENOUGH, pays=False)
    assert trials.wants_plain(4)
    assert ask(trials, PLAIN_STEPS + 1, pays=True, rows=64)[-1]
    for _ in range(PLAIN_STEPS):
        assert trials.wants_plain(16)
        trials.without_drafts(16, None)
    assert not trials.wants_plain(16)
