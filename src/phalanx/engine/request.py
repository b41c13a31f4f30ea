"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from phalanx.engine.blocks import Parent
from phalanx.engine.logprobs import PromptLogprobs
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import RequestError


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Matcher(Protocol):
    """Keeps an answer to a grammar. It stands behind the last token it accepted."""

    @property
    def finished(self) -> bool:
        """The grammar is complete and nothing but the end may follow."""
        ...

    def mask(self) -> bytes:
        """The tokens that may come next: bit `token % 8` of byte `token // 8`. At least one is set."""
        ...

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """The tokens that may come next, and behind each of these drafts, up to the first that may not come itself."""
        ...

    def accept(self, token: int) -> None:
        """Move on by one token. RequestError when nothing could follow it."""
        ...


class Need(NamedTuple):
    """Blocks of the group that keeps all tokens, and of all those that look back on a window."""

    whole: int
    windows: int


class NoRoom(NamedTuple):
    """A waiting request found no room: blocks it needed beside those that others hold, to compute so many tokens at
    first, the node where its cached prefix ended, the tokens of the block behind, and how many requests had been given
    blocks by then.
    """

    needed: Need
    most: int
    parent: Parent
    next_block: tuple[int, ...]
    taken: int


class Request:
    """The scheduler's books on one request.

    `tokens` holds prompt and output as far as they were read back. `pending` counts tokens that launched steps will
    sample but nobody has read yet; on the device they already have their place. `computed` counts the positions whose
    keys and values are in the cache once every launched step has run, so `computed <= length` always. It may go up to
    `room` before something is to be done: another block, or nothing more to launch since `longest` is reached.
    `matcher` has accepted exactly the output in `tokens`, whatever is preempted and computed again.

    Of a model with recurrent states: `restored` is the place that its state comes from when it enters the batch,
    `snapshot_ends` are positions behind which a copy is worth a step of its own, `saved` is (position, place) of a copy
    that a launched step leaves and whose prefix is not known yet, `moving_node` that of the last one made in decoding.

    Behind a row of drafts it is `untold`: the ranks do not know which token is its last. It is `rewound` if its state
    has to be taken from its twin, since some drafts did not come true. `drafts` are those that ranks have made behind
    the last token that was read, `drafted` counts all that came true and all that did not.

    `prompt_logprobs` and `embedding` are what is known of its prompt so far, if it asked; once it is `told` it has it.

    It has `__slots__`: every row's books are read in every step, and Python is slow to find one of more than 30 fields.
    """

    __slots__ = (
        "adapter",
        "arrived",
        "blocks",
        "cache_parent",
        "cached_tokens",
        "computed",
        "drafted",
        "drafts",
        "embedding",
        "ends",
        "error",
        "finish_reason",
        "found",
        "id",
        "longest",
        "matcher",
        "moving_node",
        "order",
        "owner",
        "params",
        "pending",
        "phase",
        "preemptions",
        "prompt_length",
        "prompt_logprobs",
        "queued_s",
        "refusal",
        "registered_blocks",
        "restored",
        "rewound",
        "room",
        "root",
        "salt",
        "saved",
        "seed",
        "slot",
        "snapshot_ends",
        "tokens",
        "told",
        "untold",
        "windows",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        salt: str | None,
        matcher: Matcher | None = None,
        owner: str = "",
        adapter: int = 0,
    ) -> None:
        self.id = request_id
        self.order = (params.priority, request_id)
        self.params = params
        self.seed = seed
        self.salt = salt
        self.matcher = matcher
        self.owner = owner
        self.adapter = adapter
        self.root: Parent = (adapter, salt) if adapter else salt
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.longest = len(prompt)
        self.ends: frozenset[int] = frozenset()
        self.phase = Phase.WAITING
        self.finish_reason: str | None = None
        self.error: RequestError | None = None
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.windows: list[list[int]] = []
        self.room = 0
        self.computed = 0
        self.pending = 0
        self.cached_tokens: int | None = None
        self.arrived = time.monotonic()
        self.queued_s = 0.0
        self.preemptions = 0
        self.cache_parent: Parent = self.root
        self.registered_blocks = 0
        self.snapshot_ends: list[int] = []
        self.restored: int | None = None
        self.saved: tuple[int, int] | None = None
        self.moving_node: int | None = None
        self.untold = False
        self.rewound = False
        self.drafts: list[int] = []
        self.drafted = (0, 0)
        self.refusal: NoRoom | None = None
        self.found: int | None = None
        asked = params.prompt_logprobs
        self.prompt_logprobs = None if asked is None else PromptLogprobs(1, 1 + asked)
        self.embedding: bytes | None = None
        self.told = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def rest(self) -> int:
        """Tokens that are still to be computed before the next one can be sampled."""
        return self.length - self.computed

    @property
    def resumable(self) -> int:
        """Tokens that a cached prefix may stand for. Of what it holds, nothing more can be told than keys and values:
        what is asked of the prompt and not known yet has to be computed. The last token always has.
        """
        if self.told or not self.params.looks_into_prompt:
            return len(self.tokens) - 1
        if self.params.pooling == "mean":
            return 0
        return len(self.tokens) - 1 if self.prompt_logprobs is None else len(self.prompt_logprobs)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def end_behind(self, token: int) -> str | None:
        """Why it ends with this token, its last, if it does. Its grammar moves on.

        A complete grammar ends the answer whatever else the request asks for; a failed one ends it with an error.
        """
        if self.matcher is not None:
            try:
                self.matcher.accept(token)
            except RequestError as error:
                self.error = error
                return "error"
            if self.matcher.finished:
                return "stop"
        if token in self.ends and len(self.tokens) - self.prompt_length >= self.params.min_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.longest else None
