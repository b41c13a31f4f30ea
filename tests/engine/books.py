"""What must hold in the scheduler's books at any time, and what a request must answer whoever shares its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from phalanx.engine.blocks import BlockPool
from phalanx.engine.caches import TRIMMED, CacheLayout
from phalanx.engine.core import Engine
from phalanx.engine.request import Phase, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Output, Scheduler
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import StepPlan
from phalanx.errors import RequestError

from .checking_runner import CheckingRunner, next_token

VOCAB = 7
EOS = 0


class ToyMatcher:
    """A grammar of `length` tokens in which each depends on all before it: t may follow if t + their sum is no 3x.

    With `fails_at`, the text cannot go on behind that many tokens.
    """

    def __init__(self, length: int, fails_at: int | None = None) -> None:
        self.length = length
        self.fails_at = fails_at
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) >= self.length

    def allows(self, token: int) -> bool:
        return (token + sum(self.accepted)) % 3 != 0

    def mask(self) -> bytes:
        assert not self.finished, "nothing may follow a complete grammar"
        return sum(1 << token for token in range(VOCAB) if self.allows(token)).to_bytes(4, "little")

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        ahead, masks = ToyMatcher(self.length), [self.mask()]
        ahead.accepted = list(self.accepted)
        for draft in drafts:
            if not ahead.allows(draft) or len(ahead.accepted) + 1 == self.length:
                break
            ahead.accepted.append(draft)
            masks.append(ahead.mask())
        return masks

    def accept(self, token: int) -> None:
        assert self.allows(token), f"{token} may not follow {self.accepted}"
        self.accepted.append(token)
        if len(self.accepted) == self.fails_at:
            raise RequestError("toy_failure", f"Nothing can follow {self.accepted}.", "Use another toy.")


def make_engine(
    *,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    num_blocks: int = 64,
    block_size: int = 4,
    depth: int = 1,
    prefix_caching: bool = True,
    vocab: int = VOCAB,
    windows: tuple[int, ...] = (),
    token_blocks: int = 0,
    snapshots: int | None = None,
    goes_back: bool = False,
    speculation: Speculation | None = None,
    price: Callable[[StepPlan], float] = lambda plan: 1.0,
) -> tuple[Engine, CheckingRunner]:
    """`snapshots`: how many places there are for copies of recurrent states; None where the model has no states.

    `goes_back`: these can go on before drafts that did not come true.
    """
    limits = Limits(max_num_seqs, budget, max_model_len)
    first, has_states = max_num_seqs + 1, snapshots is not None
    end = first + (snapshots or 0)
    twins = range(end, end + max_num_seqs) if has_states and speculation and not goes_back else range(0)
    layout = CacheLayout(windows, has_states, range(first, end), twins, token_blocks)
    runner = CheckingRunner(limits, num_blocks, block_size, vocab, depth, price, layout)
    scheduler = Scheduler(limits, BlockPool(num_blocks, block_size, prefix_caching), (EOS,), layout, speculation)
    return Engine(scheduler, runner, vocab), runner


class Guesser:
    """A drafter that knows the answer, and at each draft is right with this chance; beside the point otherwise."""

    def __init__(self, right: float, seed: int = 0) -> None:
        self._right, self._random = right, Random(seed)

    def propose(self, request: Request, most: int) -> list[int]:
        tokens, drafts = list(request.tokens), []
        for _ in range(self._random.randint(0, most)):
            ahead = request.matcher.masks(drafts)[-1] if request.matcher is not None else None
            token = next_token(tokens, request.seed, VOCAB, ahead)
            if self._random.random() >= self._right:
                token = (token + 1) % VOCAB
            tokens.append(token)
            drafts.append(token)
        return drafts

    def may_follow(self, request: Request) -> bool:
        return len(self.propose(request, 2)) > 1

    def forget(self, request: Request) -> None:
        pass


def greedy(max_tokens: int | None, *, seed: int = 0, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)


def answer_alone(
    prompt: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    vocab: int = VOCAB,
    matcher: ToyMatcher | None = None,
) -> tuple[list[int], str]:
    """The answer and its finish reason when there is no engine at all, only the model and the stopping rules."""
    assert params.seed is not None
    tokens = list(prompt)
    while True:
        token = next_token(tokens, params.seed, vocab, matcher.mask() if matcher is not None else None)
        tokens.append(token)
        answer = tokens[len(prompt) :]
        if matcher is not None:
            try:
                matcher.accept(token)
            except RequestError:
                return answer, "error"
            if matcher.finished:
                return answer, "stop"
        stops = {EOS, *params.stop_token_ids} if not params.ignore_eos else set(params.stop_token_ids)
        if token in stops and len(answer) >= params.min_tokens:
            return answer, "stop"
        if len(answer) == params.max_tokens or len(tokens) == max_model_len:
            return answer, "length"


def run(engine: Engine, most_steps: int = 10_000) -> list[Output]:
    """Step until there is no work, with the books checked after each step."""
    outputs: list[Output] = []
    for _ in range(most_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        check_books(engine.scheduler)
    raise AssertionError(f"still {len(engine.scheduler.requests)} requests after {most_steps} steps")


def check_answer(request: Request, max_model_len: int, vocab: int = VOCAB) -> None:
    prompt = request.tokens[: request.prompt_length]
    assert (request.output, request.finish_reason) == answer_alone(prompt, request.params, max_model_len, vocab)


def check_books(scheduler: Scheduler) -> None:
    _check_places(scheduler)
    _check_blocks(scheduler)
    _check_snapshots(scheduler)
    for request in scheduler.requests.values():
        assert 0 <= request.computed <= request.length
        if isinstance(request.matcher, ToyMatcher):
            assert request.matcher.accepted == request.output
            most = scheduler.speculation.most if scheduler.speculation else 0
            assert request.pending <= 1 + most, "a token was sampled before the one it depends on was read"
        assert len(request.tokens) < scheduler.limits.max_model_len
        assert request.length <= scheduler.limits.max_model_len


def check_empty(scheduler: Scheduler) -> None:
    """No request, and nothing kept back from the next one."""
    check_books(scheduler)
    assert not scheduler.requests
    assert scheduler.in_flight == 0
    assert all(pool.available == pool.num_blocks for pool in pools(scheduler))
    assert sorted(scheduler.free_slots) == list(range(scheduler.limits.max_num_seqs))


def _check_places(scheduler: Scheduler) -> None:
    """Each request is in one place, in order of priority and arrival; each slot has one owner or none."""
    running, waiting = scheduler.running, scheduler.waiting
    for requests in (running, waiting):
        orders = [(request.params.priority, request.id) for request in requests]
        assert orders == sorted(set(orders)), f"not in order: {orders}"
    assert sorted(scheduler.requests) == sorted(request.id for request in running + waiting)
    assert scheduler.owners == Counter(request.owner for request in running + waiting)
    assert all(request.phase is Phase.RUNNING for request in running)
    _check_stages(scheduler)
    for request in waiting:
        assert request.phase is Phase.WAITING
        assert request.slot is None
        assert (request.computed, request.registered_blocks, request.cache_parent) == (0, 0, request.salt)
    assert len(running) <= scheduler.limits.max_num_seqs
    slots = [request.slot for request in running] + scheduler.free_slots
    assert sorted(slot for slot in slots if slot is not None) == list(range(scheduler.limits.max_num_seqs))


def _check_stages(scheduler: Scheduler) -> None:
    """Who runs is a prompt, is ready for its next token, or waits for one to be read."""
    for request in scheduler.running:
        is_prompt, is_ready = request.id in scheduler.prompts, request.id in scheduler.ready
        assert is_prompt == (request.rest > 1 and not request.rewound)
        assert is_ready <= (request.rest == 1 or request.rewound)
        assert request.pending or is_prompt or is_ready, "nobody will come back to it"
        shortest = min(map(len, [request.blocks, *request.windows])) * scheduler.pool.block_size
        assert request.room == min(shortest, request.longest - 1) >= request.computed
    assert {*scheduler.prompts, *scheduler.ready} <= {request.id for request in scheduler.running}


def pools(scheduler: Scheduler) -> list[BlockPool]:
    """One for all, or one for token ids beside that of the windows."""
    caches = scheduler.caches
    return [caches.pool] if caches.whole is caches.pool else [caches.pool, caches.whole]


def held(request: Request) -> list[int]:
    """All blocks of a request, of whichever group."""
    return [*request.blocks, *(block for window in request.windows for block in window if block != TRIMMED)]


def _check_snapshots(scheduler: Scheduler) -> None:
    """Each place for a snapshot is free, kept or reserved by one request that runs."""
    reserved = [request.saved[1] for request in scheduler.requests.values() if request.saved is not None]
    assert sorted([*scheduler.caches.snapshots.places, *reserved]) == list(scheduler.caches.layout.snapshots)


def _check_blocks(scheduler: Scheduler) -> None:
    """Each block is free, idle or held; as many references as holders; only cached blocks are shared, within a salt."""
    pool, size = scheduler.pool, scheduler.pool.block_size
    assert not any(held(request) for request in scheduler.waiting), "a waiting request holds blocks"
    holders: Counter[int] = Counter(block for request in scheduler.running for block in held(request))
    cached: set[int] = set()
    for each, first in zip(pools(scheduler), (0, pool.num_blocks + 1), strict=False):
        own = range(first, first + each.num_blocks)
        assert [each.references[block] for block in own] == [holders[block] for block in own]
        of_requests = [block for block in holders if block in own]
        assert sorted([*each._free, *each._idle, *of_requests]) == list(own)
        assert each.available == each.num_blocks - len(of_requests)
        remembered = {block for block in own if pool.cache is not None and block in pool.cache}
        assert set(each._idle) <= remembered
        assert not set(each._free) & remembered
        cached |= remembered
    content: dict[int, tuple[str | None, list[int]]] = {}
    for request in scheduler.running:
        assert len(set(held(request))) == len(held(request))
        assert len(request.blocks) >= pool.blocks_for(request.computed)
        _check_windows(scheduler, request)
        for index, block in enumerate(request.blocks):
            if holders[block] > 1:
                assert block in cached, f"block {block} is shared and not in the prefix cache"
                assert (index + 1) * size <= request.computed, f"block {block} is shared and not full"
                prefix = (request.salt, request.tokens[: (index + 1) * size])
                assert content.setdefault(block, prefix) == prefix, f"block {block} has two contents"


def _check_windows(scheduler: Scheduler, request: Request) -> None:
    """What the next token looks back on is held, also if drafts on their way do not come true; nothing else is, behind
    what a prompt has computed.
    """
    size, layout = scheduler.pool.block_size, scheduler.caches.layout
    assert all(len(window) <= len(request.blocks) for window in request.windows)
    drafted = [row.start for step in scheduler._in_flight for row in step.drafted if row.request is request]
    next_one = min([request.computed, *drafted])
    for reach, window in zip(layout.windows, request.windows, strict=True):
        first = max(0, next_one - reach + 1) // size
        assert TRIMMED not in window[first:], f"blocks in reach of token {next_one} were given up"
        if request.id in scheduler.prompts:
            assert set(window[:first]) <= {TRIMMED}, "a prompt keeps what nobody looks back on"
