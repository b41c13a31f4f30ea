"""How many drafts a step takes: as many as pay, and none where they do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from phalanx.engine.agenda import Launched
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.speculation import RankDrafter, Speculation
from phalanx.engine.step_curve import STALE, StepCurve
from phalanx.engine.step_plan import StepPlan, StepResult, StepTimes

from .books import Guesser, answer_alone, check_answer, greedy, make_engine, run

LONG = 400
CONTEXT = 512


@cache
def seconds(slope: float, batch: int, right: float | None, depth: int = 1, draft_s: float | None = None) -> float:
    """Of answers of `LONG` tokens, where a step takes one second, and `slope` more for each of its tokens.

    Where a draft takes `draft_s`, ranks make them, and it takes them as long to take a step in.
    """
    drafter = Guesser(right or 0.0) if draft_s is None else RankDrafter()
    speculation = None if right is None else Speculation(drafter, 8)
    engine, runner = make_engine(
        max_num_seqs=max(64, batch),
        budget=1024,
        max_model_len=CONTEXT,
        num_blocks=batch * CONTEXT // 4 + 64,
        depth=depth,
        speculation=speculation,
    )
    runner._inner._price = lambda plan: 1.0 + slope * plan.num_tokens
    runner.right, runner.draft_s = right or 0.0, draft_s or 0.0
    requests = [engine.add([1, 2, 3], greedy(LONG, seed=seed)) for seed in range(batch)]
    while engine.has_work:
        engine.step()
    for request in requests:
        check_answer(request, CONTEXT)
    return runner.clock


@pytest.mark.parametrize("slope", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_that_fail_cost_next_to_nothing(slope: float, batch: int) -> None:
    assert seconds(slope, batch, right=0.0) < 1.025 * seconds(slope, batch, right=None)


def test_drafts_pay_where_a_longer_step_costs_little() -> None:
    assert seconds(0.01, 1, right=0.95) < 0.4 * seconds(0.01, 1, right=None)
    assert seconds(0.1, 6, right=0.95) < 0.9 * seconds(0.1, 6, right=None)


@pytest.mark.parametrize(("slope", "batch"), [(0.01, 1), (0.1, 3), (1.0, 3)])
def test_ranks_stop_making_drafts_that_fail(slope: float, batch: int) -> None:
    """And do nothing beside the steps of those whom they have given up."""
    assert seconds(slope, batch, right=0.0, draft_s=0.03) < 1.02 * seconds(slope, batch, right=None)


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_take_in_no_step_of_those_that_were_given_up(depth: int) -> None:
    """A prompt is taken in always, beside whomever, and has its try; who missed a step has no drafts ever after."""
    engine, runner = make_engine(max_num_seqs=8, num_blocks=400, max_model_len=300, depth=depth, speculation=by_ranks())
    runner._inner._price = lambda plan: 1.0 + 0.05 * plan.num_tokens
    runner.right, runner.draft_s = 0.0, 0.05
    requests = [engine.add([1, 2, 3], greedy(250))]
    while len(requests) < 4:
        for _ in range(60):
            engine.step()
        requests.append(engine.add([len(requests)] * 30, greedy(40 * len(requests))))
    run(engine)
    for request in requests:
        check_answer(request, 300)
        assert request.drafted[1], "each had its try"
    _check_nobody_drafts_behind_a_gap(runner.plans)
    resting = [plan for plan in runner.plans if not plan.taken_in]
    assert 0.5 < len(resting) / len(runner.plans) < 0.9


def test_drafts_behind_the_end_are_not_of_the_answer() -> None:
    """All come true, and an end that nobody foresaw is among them."""
    known, _ = answer_alone([1, 2, 3], greedy(30), 64)
    ended = 0
    for end in range(3, 20):
        speculation = Speculation(Guesser(1.0), 8)
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        engine, runner = make_engine(speculation=speculation)
        asked = SamplingParams(max_tokens=30, seed=0, ignore_eos=True, stop_token_ids=[known[end]])
        request = engine.add([1, 2, 3], asked)
        outputs = run(engine)
        accepted, rejected = request.drafted
        assert outputs[-1].drafted == request.drafted
        rows = [count for plan in runner.plans for count in plan.samples if count]
        drafts, behind = sum(rows) - len(rows), sum(rows) - len(request.output)
        assert request.output == known[: known.index(known[end]) + 1]
        assert accepted + rejected == drafts
        assert rejected == max(0, behind - 1), "of what is behind the end one is no draft"
        ended += rejected > 0
    assert ended > 5


def by_ranks() -> Speculation:
    """With no trials: what is known of requests decides alone."""
    speculation = Speculation(RankDrafter(), 4)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    return speculation


def test_the_time_of_drafts_that_stay_is_of_those_of_the_step_before() -> None:
    """They are read with the next step, whose own may be more or fewer."""
    drafting = make_engine(speculation=by_ranks())[0].scheduler._drafting
    assert drafting is not None
    made = 0
    for number, ahead in enumerate((4, 1, 4, 4, 1, 2)):
        plan = StepPlan(number, [], [0], [9], [1], [1], [], ahead=ahead, drafts_stay=True)
        times = StepTimes(device=1.0, draft=0.1 * made, steady=True)
        drafting.observe(Launched(plan, [], []), StepResult(number, [], [], times))
        made = ahead
    assert drafting.speculation._draft_s == pytest.approx(0.1)


def test_one_draft_that_waited_for_a_graph_ends_no_drafting() -> None:
    """Drafts take a tenth of a step. One in a row that takes as long as 25 steps is no sign; some are."""
    speculation, requests = by_ranks(), [Request(0, [1], greedy(9), 0, None)]
    for each in (25.0, 0.1, 25.0, 0.1):
        speculation.observe(1, 1.0, ahead=4, each=each)
        assert speculation.ahead(requests) >= 3
    for _ in range(3):
        speculation.observe(1, 1.0, ahead=4, each=25.0)
    assert speculation.ahead(requests) == 0


def _check_nobody_drafts_behind_a_gap(plans: list[StepPlan]) -> None:
    missed: set[int] = set()
    for plan in plans:
        missed -= {admission.slot for admission in plan.admissions}
        drafted = {slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples > 1}
        assert not drafted & missed
        if not plan.taken_in:
            assert not plan.ahead
            assert plan.samples == plan.counts == [1] * len(plan.slots), "a prompt was missed"
            missed |= set(plan.slots)


def test_one_that_had_no_luck_at_first_goes_by_the_others_too() -> None:
    """Its drafts are as good as theirs: shut out, it would end long after them, in steps made long by theirs."""
    speculation = by_ranks()
    unlucky, *others = (Request(number, [1], greedy(9), 0, None) for number in range(5))
    for _ in range(20):
        for other in others:
            speculation.verified(other, 3, 3)
    speculation.verified(unlucky, 1, 0)
    speculation.verified(unlucky, 1, 0)
    alone = by_ranks()
    alone.verified(unlucky, 1, 0)
    alone.verified(unlucky, 1, 0)
    assert speculation._chances([unlucky])[0] > 0.5 > 0.4 > alone._chances([unlucky])[0]
    for _ in range(10):
        speculation.verified(unlucky, 1, 0)
    assert speculation._chances([unlucky])[0] < 0.35, "its own record counts for more"


def test_what_no_rank_drafts_is_never_given_up() -> None:
    speculation = Speculation(Guesser(0.0), 4)
    engine, runner = make_engine(num_blocks=200, max_model_len=300, speculation=speculation)
    engine.add([1, 2, 3], greedy(250))
    run(engine)
    assert not any(plan.taken_in for plan in runner.plans), "nobody on the ranks would draft"
    assert any(samples > 1 for plan in runner.plans[-120:] for samples in plan.samples), "it is tried again"


def test_ranks_make_drafts_that_pay() -> None:
    assert seconds(0.01, 1, right=0.8, draft_s=0.03) < 0.45 * seconds(0.01, 1, right=None)
    assert seconds(0.01, 1, right=0.8, draft_s=0.9) < 1.04 * seconds(0.01, 1, right=None), "and none that are dear"
    assert seconds(0.01, 1, right=0.8, depth=2, draft_s=0.03) < 0.5 * seconds(0.01, 1, right=None, depth=2)


def test_two_steps_in_flight_make_room_for_drafts() -> None:
    """Somebody whose next token is on its way has no drafts: a text that repeats itself waits for it."""
    assert seconds(0.01, 1, right=0.95, depth=2) < 0.5 * seconds(0.01, 1, right=None, depth=2)


def test_two_halves_of_a_batch_do_not_take_turns() -> None:
    """Where some wait for drafts and others do not, each step holds half of the rows and takes as long as a whole."""
    assert seconds(0.002, 12, right=0.0, depth=2) < 1.02 * seconds(0.002, 12, right=None, depth=2)


def test_a_curve_through_steps_tells_what_one_more_token_costs() -> None:
    speculation = Speculation(Guesser(1.0), 4)
    assert speculation._share_of_one_more(4) == pytest.approx(0.02), "nothing is known yet"
    for tokens in (1, 3, 8) * 20:
        speculation.observe(tokens, 2.0 + 0.5 * tokens)
    assert speculation._share_of_one_more(4) == pytest.approx(0.5 / 4.0)
    assert speculation._share_of_one_more(100) == pytest.approx(0.25 / (6.0 + 0.25 * 92)), "beyond there is hope"
    for _ in range(20):
        speculation.observe(16, 6.4)
    assert speculation._share_of_one_more(4) == pytest.approx(0.5 / 4.0), "it need not be straight"
    assert speculation._share_of_one_more(12) == pytest.approx(0.05 / 6.2)


def test_a_curve_makes_light_of_a_step_that_had_to_wait_and_forgets_what_it_has_not_met_for_long() -> None:
    curve = StepCurve()
    for tokens, seconds in ((2, 1.0), (4, 9.0), (8, 2.0)):
        curve.observe(tokens, seconds)
    assert curve.of(4) == 2.0, "no more than a larger one took"
    for _ in range(2 * STALE):
        curve.observe(2, 1.0)
    assert curve.of(4) != 2.0


def seconds_with_experts(most: int, is_forced: bool) -> float:
    """Of answers to eight requests, where four of five drafts come true and a step takes what a mixture of 256 experts
    takes, each token of which reads 8.
    """
    speculation = Speculation(RankDrafter(), max(1, most))
    if is_forced:
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        speculation.ahead = lambda requests: most  # type: ignore[method-assign]
    engine, runner = make_engine(
        max_num_seqs=32, budget=1024, max_model_len=CONTEXT, num_blocks=8 * CONTEXT // 4 + 64, speculation=speculation
    )
    runner._inner._price = lambda plan: 3.35 + 0.0818 * 256 * (1 - (1 - 1 / 32) ** plan.num_tokens)
    runner.right, runner.draft_s = 0.8, 0.3
    for seed in range(8):
        engine.add([1, 2, 3], greedy(LONG, seed=seed))
    run(engine)
    return runner.clock


def test_all_drafts_are_made_where_the_last_ones_are_cheaper_than_the_first() -> None:
    """As on an H200, of DeepSeek-V3 at eight rows: the second draft of a row alone would not seem worth its time."""
    forced = [seconds_with_experts(most, is_forced=True) for most in range(4)]
    assert forced[3] < 0.97 * forced[2] < 0.97 * 0.97 * forced[1] < 0.9 * forced[0]
    assert seconds_with_experts(3, is_forced=False) < 1.04 * forced[3]


@pytest.mark.parametrize("drafts_by_ranks", [False, True])
def test_steps_that_are_not_steady_count_for_nothing(drafts_by_ranks: bool) -> None:
    """Every third takes a hundred times as long, for a graph is captured. Drafts are as many as if it did not."""
    made = []
    for is_steady in (True, False):
        speculation = Speculation(RankDrafter() if drafts_by_ranks else Guesser(1.0), 3)
        engine, runner = make_engine(num_blocks=200, max_model_len=300, speculation=speculation)
        runner.right, runner.draft_s = 1.0, 0.05
        collect = runner.collect

        def held_up(collect: Callable[[], StepResult] = collect) -> StepResult:
            result = collect()
            if result.step % 3:
                return result
            return msgspec.structs.replace(result, times=StepTimes(device=100.0, draft=100.0, steady=False))

        if not is_steady:
            runner.collect = held_up  # type: ignore[method-assign]
        engine.add([1, 2, 3], greedy(250))
        run(engine)
        made.append(speculation.totals.draft_tokens)
    assert made[1] > 0.9 * made[0] > 100


def test_who_computes_again_does_not_wait_for_a_full_batch() -> None:
    """A state is taken back as a whole: the tokens that came true since are computed once more, with others beside."""
    speculation = Speculation(Guesser(0.5), 4)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    engine, _ = make_engine(max_num_seqs=3, snapshots=0, max_model_len=200, num_blocks=160, speculation=speculation)
    first, other = engine.add([1, 2, 3], greedy(60)), engine.add([4, 5], greedy(190))
    while True:
        late = engine.add([6, 1], greedy(190))
        engine.step()
        if first.rewound:
            break
        engine.cancel(late.id)
    for _ in range(70):
        engine.step()
    assert first.finish_reason == "length"
    assert other.finish_reason is late.finish_reason is None
    run(engine)
    check_answer(first, 200)


def test_states_that_go_back_are_neither_copied_nor_computed_again() -> None:
    speculation = Speculation(Guesser(0.5), 4)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    engine, runner = make_engine(
        snapshots=0, goes_back=True, max_model_len=200, num_blocks=160, speculation=speculation, prefix_caching=False
    )
    request = engine.add([1, 2, 3], greedy(60))
    run(engine)
    check_answer(request, 200)
    assert 0 < speculation.totals.accepted_tokens < speculation.totals.draft_tokens
    assert not any(plan.restored for plan in runner.plans)
    assert all(plan.counts == plan.samples for plan in runner.plans[1:])


def test_a_step_says_what_its_drafts_cost() -> None:
    plan = StepPlan(1, [], [0, 1, 2], [9, 4, 0], [1, 3, 5], [1, 3, 0], [])
    sums = plan.sums()
    assert (sums.decodes, sums.context) == (4, 10 + 5 + 6 + 7)
    assert (sums.prompts, sums.prompt_tokens) == (1, 5)
    assert plan.yielded() == ([0, 1, 1, 1], [10, 5, 6, 7])
