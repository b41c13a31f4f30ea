"""Owners have equal parts of the engine: what one sends costs another half its speed at most, and never its way in."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.agenda import Drafted
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.request import Phase, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.sharing import LONGEST_STEP_S, StepPace, charge, parts_of
from phalanx.engine.speculation import Speculation

from .books import Guesser, check_books, greedy, make_engine

CPU = (0.035, 0.0085)
STEEP = (0.002, 0.007)
GPU = (0.008, 0.00005)
LONG = 4000


class House:
    """An engine in virtual time whose steps take a time each and one for each token."""

    def __init__(self, per_step: float, per_token: float, blocks: int = 20_000, depth: int = 1) -> None:
        self.runner = ModelledRunner(lambda plan: per_step + per_token * plan.num_tokens, depth=depth)
        limits = Limits(64, 256, 8192)
        self.engine = Engine(Scheduler(limits, BlockPool(blocks, 16)), self.runner, 1000)
        self.tokens: Counter[str] = Counter()
        self.worst_gap = 0.0
        self._last: dict[int, float] = {}
        self._owners: dict[int, str] = {}

    @property
    def clock(self) -> float:
        return self.runner.clock

    def send(self, owner: str, prompt: int = 4, answer: int = 32, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=0, priority=priority)
        request = self.engine.add([1 + len(self._owners) % 900, *[7] * (prompt - 1)], params, owner=owner)
        self._last[request.id], self._owners[request.id] = self.clock, owner
        return request

    def step(self) -> None:
        for output in self.engine.step():
            owner = self._owners[output.request_id]
            self.tokens[owner] += 1
            if owner == "honest":
                self.worst_gap = max(self.worst_gap, self.clock - self._last[output.request_id])
            self._last[output.request_id] = self.clock

    def stream(self, seconds: float, away: float = 0.0) -> float:
        """One short answer after the other for an honest owner, who is away in between; its tokens a second."""
        start, before = self.clock, self.tokens["honest"]
        while self.clock < start + seconds:
            request = self.send("honest")
            while request.phase is not Phase.FINISHED:
                self.step()
                assert self.clock < start + 10 * seconds, "kept from any token"
            self.run(away)
        return (self.tokens["honest"] - before) / (self.clock - start)

    def run(self, seconds: float) -> None:
        end = self.clock + seconds
        while self.clock < end:
            self.step()


def attack(house: House, kind: str) -> None:
    if kind == "places":
        for _ in range(240):
            house.send("greedy", prompt=4, answer=LONG)
    elif kind == "prompts":
        for _ in range(40):
            house.send("greedy", prompt=LONG, answer=1)
    elif kind == "priority":
        for _ in range(240):
            house.send("greedy", prompt=200, answer=LONG, priority=-1000)


@pytest.mark.parametrize(("prices", "depth"), [(CPU, 1), (GPU, 2)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["places", "prompts", "priority"])
def test_an_honest_owner_has_half_its_speed_and_no_long_stall(
    kind: str, prices: tuple[float, float], depth: int
) -> None:
    house = House(*prices, depth=depth)
    alone = house.stream(5)
    attack(house, kind)
    house.run(3)
    house.worst_gap = 0.0
    assert house.stream(5) >= 0.5 * alone
    assert house.worst_gap < 0.25
    assert house.tokens["greedy"] > 0 or kind == "prompts"


def test_who_needs_little_keeps_more_than_half_where_two_tokens_take_twice_the_time_of_one() -> None:
    """Also if it is away for a moment after each answer, in which the other has the engine for itself."""
    house = House(*STEEP)
    alone = house.stream(5)
    attack(house, "places")
    house.run(3)
    house.worst_gap = 0.0
    assert house.stream(5, away=0.003) >= 0.56 * alone
    assert house.worst_gap < 0.1
    before, start = house.tokens["greedy"], house.clock
    house.stream(5, away=0.003)
    assert (house.tokens["greedy"] - before) / (house.clock - start) >= 0.3 * alone


def test_two_that_need_as_little_have_the_same() -> None:
    house = House(*STEEP)
    for owner in ("one", "two"):
        house.send(owner, answer=LONG)
    house.run(5)
    assert house.tokens["one"] == pytest.approx(house.tokens["two"], abs=2)


def test_where_steps_hardly_grow_with_their_tokens_nobody_is_held_back() -> None:
    apart, together = House(*GPU), House(*GPU)
    for house, owners in ((apart, ["greedy"]), (together, ["greedy", "honest"])):
        for owner in owners:
            for _ in range(60 if owner == "greedy" else 1):
                house.send(owner, answer=LONG)
        house.run(10)
    assert together.tokens["greedy"] > 0.95 * apart.tokens["greedy"]


def test_two_that_want_everything_get_the_same() -> None:
    house = House(*CPU)
    for _ in range(100):
        house.send("one", answer=LONG)
    house.run(5)
    for _ in range(100):
        house.send("two", answer=LONG)
    house.run(1)
    house.tokens.clear()
    house.run(20)
    assert house.tokens["one"] == pytest.approx(house.tokens["two"], rel=0.1)
    by_owner = Counter(request.owner for request in house.engine.scheduler.running)
    assert by_owner["two"] >= 20


def test_who_comes_finds_blocks_and_keeps_them_though_another_grows() -> None:
    """All blocks are one owner's: it gives up its youngest, not those of whoever came last."""
    house = House(*GPU, blocks=600)
    for _ in range(12):
        house.send("greedy", answer=LONG)
    house.run(8)
    scheduler = house.engine.scheduler
    assert scheduler.preemptions > 0
    assert scheduler.pool.available < 20
    request = house.send("honest", prompt=400, answer=100)
    while request.phase is not Phase.FINISHED:
        house.step()
        check_books(scheduler)
    assert request.preemptions == 0
    assert house.worst_gap < 0.25


def test_who_needs_more_than_another_has_does_not_drive_it_out() -> None:
    house = House(*GPU, blocks=520)
    small = house.send("small", prompt=2000, answer=500)
    house.run(1)
    large = house.send("large", prompt=8000, answer=2)
    while large.phase is not Phase.FINISHED:
        house.step()
    assert (small.preemptions, small.phase) == (0, Phase.FINISHED)


def test_requests_of_one_owner_take_turns() -> None:
    house = House(*CPU)
    requests = [house.send("one", answer=LONG) for _ in range(30)]
    while not all(request.output for request in requests):
        house.step()
    begun = [len(request.output) for request in requests]
    house.run(20)
    added = [len(request.output) - before for request, before in zip(requests, begun, strict=True)]
    assert max(added) - min(added) <= 1
    assert min(added) > 20


def tokens_in(seconds: float, others: int) -> int:
    """Of one answer whose drafts always come true, beside so many of another owner."""
    speculation = Speculation(Guesser(1.0), 4)
    engine, runner = make_engine(
        max_num_seqs=32,
        budget=64,
        max_model_len=512,
        num_blocks=8192,
        speculation=speculation,
        price=lambda plan: CPU[0] + CPU[1] * plan.num_tokens,
    )
    for seed in range(others):
        engine.add([1, 2, 3], greedy(500, seed=seed), owner="greedy")
    honest = engine.add([1, 2, 3], greedy(500), owner="honest")
    while runner.clock < 5:
        engine.step()
    before, start = len(honest.output), runner.clock
    while runner.clock < start + seconds:
        engine.step()
        check_books(engine.scheduler)
    return len(honest.output) - before


def test_drafts_are_of_their_owners_part() -> None:
    alone = tokens_in(5, others=0)
    assert alone > 5 / (CPU[0] + CPU[1]), "drafts pay"
    assert tokens_in(5, others=20) >= 0.5 * alone


def test_an_owner_computes_no_more_than_its_part_with_its_drafts() -> None:
    engine, _ = make_engine(
        max_num_seqs=32, budget=12, max_model_len=200, num_blocks=4096, speculation=eager(Guesser(1.0))
    )
    for owner in ("greedy", "greedy", "greedy", "honest"):
        engine.add([1, 2, 3], greedy(150), owner=owner)
    scheduler, drafted = engine.scheduler, 0
    for _ in range(40):
        parts = scheduler._sharing.parts()
        scheduler._sharing.parts = parts.copy  # type: ignore[method-assign]
        plan = scheduler.schedule()
        del scheduler._sharing.parts
        assert plan is not None
        owners = {request.slot: request.owner for request in scheduler.running}
        computed = Counter[str]()
        for slot, count in zip(plan.slots, plan.counts, strict=True):
            computed[owners[slot]] += count
        assert computed <= Counter(parts)
        drafted += max(plan.samples) > 1
        engine.runner.launch(plan)
        scheduler.apply(engine.runner.collect())
    assert drafted > 20


def test_who_computes_again_more_than_its_part_is_not_kept_from_it() -> None:
    """A state is taken back as a whole: then there are several tokens to compute, and others have come meanwhile."""
    engine, _ = make_engine(
        max_num_seqs=8, budget=8, max_model_len=64, num_blocks=400, snapshots=0, speculation=eager(Guesser(0.6))
    )
    first = engine.add([1, 2, 3], greedy(60), owner="first")
    while not (first.rewound and first.rest > 2):
        engine.step()
    others = [engine.add([1, 2, 3], greedy(40, seed=seed), owner=f"owner {seed}") for seed in range(7)]
    for _ in range(60):
        engine.step()
        check_books(engine.scheduler)
    assert first.finish_reason == "length"
    assert min(len(request.output) for request in others) > 20


def eager(drafter: Guesser) -> Speculation:
    """Drafts cost nothing, so there are always some."""
    speculation = Speculation(drafter, 4)
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    return speculation


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6)), max_size=8),
)
def test_what_is_left_never_exceeds_what_the_step_has(parts: dict[str, int], rows: list[tuple[str, int]]) -> None:
    budget, spent, plain, drafted = sum(parts.values()), 0, [], []
    for owner, tokens in rows:
        if owner in parts and spent + tokens <= budget:
            spent += tokens
            request = Request(len(rows), [1], SamplingParams(), 0, None, None, owner)
            if tokens == 1:
                plain.append(request)
            else:
                drafted.append(Drafted(request, 0, tokens, [], []))
    left = dict(parts)
    charge(left, plain, drafted)
    assert min(left.values()) >= 0
    assert sum(left.values()) + spent == budget


@given(st.dictionaries(st.text("abc", max_size=2), st.integers(1, 500), min_size=1), st.integers(0, 2000))
def test_parts_are_equal_but_for_those_that_want_less(wanted: dict[str, int], more: int) -> None:
    total = len(wanted) + more
    parts = parts_of(wanted, total)
    assert parts.keys() == wanted.keys()
    assert sum(parts.values()) <= total
    assert all(1 <= parts[owner] <= wanted[owner] for owner in wanted)
    short = [part for owner, part in parts.items() if part < wanted[owner]]
    if short:
        assert max(parts.values()) == min(short)
        assert total - sum(parts.values()) < len(short)


def test_the_pace_is_learned_from_any_sizes_and_forgets_a_hiccup() -> None:
    pace = StepPace()
    assert pace.beside(1) == float("inf")
    for number in range(200):
        tokens = 1 if number % 8 else 4
        pace.learn(tokens, CPU[0] + CPU[1] * tokens)
    known = pace.in_time()
    assert known == pytest.approx((LONGEST_STEP_S - CPU[0]) / CPU[1], rel=0.01)
    pace.learn(4, 60.0)
    assert pace.in_time() > known / 3
    for number in range(200):
        tokens = 1 if number % 8 else 4
        pace.learn(tokens, CPU[0] + CPU[1] * tokens)
    assert pace.in_time() == pytest.approx(known, rel=0.05)


def test_small_steps_are_known_by_their_size_and_large_ones_by_a_line() -> None:
    """A second token nearly doubles a step here, though of many each takes little: the line alone would allow three."""
    pace, seconds = StepPace(), {1: 0.0085, 2: 0.0155, 3: 0.0195, 4: 0.023, 200: 0.4}
    for number in range(300):
        tokens = (1, 2, 1, 2, 3, 4, 1, 200)[number % 8]
        pace.learn(tokens, seconds[tokens])
    assert pace.beside(1) == pytest.approx(0.5 * 0.0085 / 0.007, rel=0.02)
    assert pace.beside(100) == pytest.approx(50, rel=0.1)
