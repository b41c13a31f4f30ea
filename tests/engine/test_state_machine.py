"""Any order of arrivals, cancellations and steps keeps the books, and every request gets the answer it gets alone."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.engine.caches import CacheLayout
from phalanx.engine.request import Phase, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.speculation import RankDrafter, Speculation

from .books import EOS, VOCAB, Guesser, ToyMatcher, answer_alone, check_books, check_empty, held, make_engine, pools

SHARED = [1 + index % (VOCAB - 1) for index in range(30)]
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Mostly a piece of one long text from its beginning, then a few tokens of its own."""
    head = draw(st.sampled_from([0, 4, 8, 8, 12, 12, 16, 23]))
    return SHARED[:head] + draw(st.lists(token_ids, min_size=0 if head else 1, max_size=3))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, 24))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens or 4))),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(token_ids, max_size=1)),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
    )


matchers = st.builds(ToyMatcher, st.integers(1, 20), st.none() | st.integers(1, 8))


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.added: list[Request] = []
        self.read: defaultdict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, str] = {}
        self.broken = False

    @initialize(
        block_size=st.integers(1, 4),
        max_model_len=st.integers(8, 28),
        spare_blocks=st.integers(0, 5),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 22),
        depth=st.integers(1, 3),
        prefix_caching=st.booleans(),
        windows=st.sampled_from([(), (), (3,), (6, 6), (2, 9)]),
        only_windows=st.booleans(),
        snapshots=st.sampled_from([None, None, 0, 1, 6]),
        goes_back=st.booleans(),
        guessed=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
        most_drafts=st.integers(1, 8),
        by_ranks=st.booleans(),
        drafts_stay=st.booleans(),
        owners=st.sampled_from([("",), ("",), ("a",), ("", "a"), ("a", "b", "c")]),
        seconds_per_token=st.sampled_from([0.0, 0.01, 0.05]),
    )
    def start(
        self,
        block_size: int,
        max_model_len: int,
        spare_blocks: int,
        max_num_seqs: int,
        budget: int,
        depth: int,
        prefix_caching: bool,
        windows: tuple[int, ...],
        only_windows: bool,
        snapshots: int | None,
        goes_back: bool,
        guessed: float | None,
        most_drafts: int,
        by_ranks: bool,
        drafts_stay: bool,
        owners: tuple[str, ...],
        seconds_per_token: float,
    ) -> None:
        self.max_model_len = max_model_len
        self.owners = owners
        drafter = RankDrafter() if by_ranks else Guesser(guessed or 0.0)
        speculation = None if guessed is None else Speculation(drafter, most_drafts, drafts_stay and by_ranks)
        if speculation is not None:
            speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        longest = -(-max_model_len // block_size)
        token_blocks = longest + 2 * spare_blocks if windows and only_windows else 0
        need = CacheLayout(windows).need(longest, block_size)
        self.engine, self.runner = make_engine(
            max_num_seqs=max_num_seqs,
            budget=budget,
            max_model_len=max_model_len,
            num_blocks=need.windows + (0 if token_blocks else need.whole) + spare_blocks,
            block_size=block_size,
            depth=depth,
            prefix_caching=prefix_caching,
            windows=windows,
            token_blocks=token_blocks,
            snapshots=snapshots,
            goes_back=goes_back,
            speculation=speculation,
            price=lambda plan: 0.04 + seconds_per_token * plan.num_tokens,
        )
        self.runner.right = guessed or 0.0

    @precondition(lambda self: len(self.added) < 12)
    @rule(prompt=prompts(), params=sampling_params(), salt=st.sampled_from([None, None, None, "a", "b"]))
    def add(self, prompt: list[int], params: SamplingParams, salt: str | None) -> None:
        self.added.append(self._add(prompt, params, salt))

    @precondition(lambda self: len(self.added) < 12)
    @rule(prompt=prompts(), params=sampling_params(), matcher=matchers)
    def add_under_a_grammar(self, prompt: list[int], params: SamplingParams, matcher: ToyMatcher) -> None:
        self.added.append(self._add(prompt, params, None, matcher))

    @precondition(lambda self: len(self.added) < 12)
    @rule(params=sampling_params(), length=st.integers(1, 24), count=st.integers(2, 4))
    def add_the_same_prompt_often(self, params: SamplingParams, length: int, count: int) -> None:
        self.step(2)
        for _ in range(count):
            self.added.append(self._add(SHARED[:length], params))

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel_any(self, data: st.DataObject) -> None:
        self._cancel(data.draw(st.sampled_from(self.added)))

    @precondition(lambda self: self.added and self.engine.scheduler.running)
    @rule(data=st.data(), count=st.integers(0, 4))
    def cancel_a_running_one(self, data: st.DataObject, count: int) -> None:
        self._cancel(data.draw(st.sampled_from(self.engine.scheduler.running)))
        self.step(count)

    @precondition(lambda self: self.added and self._preempted())
    @rule(data=st.data())
    def cancel_a_preempted_one(self, data: st.DataObject) -> None:
        self._cancel(data.draw(st.sampled_from(self._preempted())))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @invariant()
    def books_are_right(self) -> None:
        if self.added:
            check_books(self.engine.scheduler)

    @invariant()
    def what_was_read_is_what_is_booked(self) -> None:
        for request in self.added:
            assert self.read[request.id] == request.output
            assert (request.finish_reason is None) == (request.phase is not Phase.FINISHED)
            assert (request.phase is Phase.FINISHED) == (request.id not in self.engine.scheduler.requests)

    def _add(
        self, prompt: list[int], params: SamplingParams, salt: str | None = None, matcher: ToyMatcher | None = None
    ) -> Request:
        owner = self.owners[len(self.added) % len(self.owners)]
        return self.engine.add(prompt[: self.max_model_len - 1], params, salt, matcher, owner)

    def teardown(self) -> None:
        """In each step the oldest request moves on, or with owners one of each, unless it gives way to a smaller one.

        So all of them end within a number of steps known beforehand.
        """
        if not self.added or self.broken:
            return
        bound = (4 if self.owners == ("",) else 12) * self.max_model_len * len(self.added)
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self._step()
            check_books(self.engine.scheduler)
        assert not self.engine.has_work, f"requests starve: not done after {bound} steps"
        check_empty(self.engine.scheduler)
        for request in self.added:
            self._check_answer(request)

    def _check_answer(self, request: Request) -> None:
        toy, prompt = request.matcher, request.tokens[: request.prompt_length]
        fresh = ToyMatcher(toy.length, toy.fails_at) if isinstance(toy, ToyMatcher) else None
        answer, reason = answer_alone(prompt, request.params, self.max_model_len, matcher=fresh)
        if request.finish_reason == "cancelled":
            assert request.output == answer[: len(request.output)]
            assert request.id not in self.ended
        else:
            assert (request.output, request.finish_reason) == (answer, reason)
            assert self.ended[request.id] == reason
        assert EOS not in request.output[request.params.min_tokens : -1] or request.params.ignore_eos
        assert (request.error is not None) == (reason == "error" and request.finish_reason != "cancelled")

    def _preempted(self) -> list[Request]:
        return [request for request in self.engine.scheduler.waiting if request.preemptions]

    def _cancel(self, request: Request) -> None:
        both = pools(self.engine.scheduler)
        references = Counter(block for other in self.engine.scheduler.running for block in held(other))
        alone = [block for block in held(request) if references[block] == 1]
        available, live = sum(pool.available for pool in both), request.phase is not Phase.FINISHED
        assert self.engine.cancel(request.id) is live
        assert sum(pool.available for pool in both) == available + (len(alone) if live else 0)
        assert not self.engine.cancel(request.id)

    def _step(self) -> None:
        self.broken = True
        outputs = self.engine.step()
        self.broken = False
        for output in outputs:
            assert output.token is not None
            assert output.request_id not in self.ended, "a token after the end"
            self.read[output.request_id].append(output.token)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=400,
    stateful_step_count=25,
    deadline=None,
)
