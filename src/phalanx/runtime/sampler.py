"""Sampling: from logits to tokens, each row by its own parameters and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.plan import TokenLogprobs
from phalanx.runtime.batch import Occupant

_MASK = 2**64 - 1
_GREEDY_BELOW = 1e-5


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends on nothing but the request's seed and the position (splitmix64)."""
    state = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return (state >> 11) * 2.0**-53


@dataclass(frozen=True)
class SamplingRow:
    """A row that yields a token: who asked, the position the token will have, and which tokens a grammar allows."""

    occupant: Occupant
    slot: int
    position: int
    mask: bytes | None = None

    @property
    def produced(self) -> int:
        return self.position - self.occupant.prompt_length

    @property
    def wants_the_likeliest(self) -> bool:
        """Greedy, with nothing that changes or reports the logits."""
        params = self.occupant.params
        plain = not params.penalised and not params.logit_bias and self.produced >= params.min_tokens
        return plain and params.temperature < _GREEDY_BELOW and params.logprobs is None and self.mask is None

    def allows_other_than(self, tokens: Sequence[int]) -> bool:
        if self.mask is None:
            return True
        return int.from_bytes(self.mask, "little") & ~sum(1 << token for token in set(tokens)) != 0


@dataclass(frozen=True)
class Sampled:
    """Tokens, and log-probabilities where they were asked for: (sampled, top values, top ids)."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    arrived: torch.cuda.Event | None = None

    def start_reading(self) -> Sampled:
        """A copy on its way to the host behind the step that made it, and ahead of the next one."""
        if not self.tokens.is_cuda:
            return self
        tokens = self.tokens.to("cpu", non_blocking=True)
        parts = None if self.logprobs is None else tuple(part.to("cpu", non_blocking=True) for part in self.logprobs)
        arrived = torch.cuda.Event()
        arrived.record()
        return Sampled(tokens, parts, arrived)  # type: ignore[arg-type]

    def read(self, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.logprobs is None:
            return self.tokens.tolist(), [None] * len(rows)
        chosen, values, ids = (part.tolist() for part in self.logprobs)
        read: list[TokenLogprobs | None] = []
        for index, row in enumerate(rows):
            wanted = row.occupant.params.logprobs
            top = list(zip(ids[index], values[index], strict=True))[:wanted]
            read.append(None if wanted is None else TokenLogprobs(chosen[index], top))
        return self.tokens.tolist(), read


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = list(eos_token_ids)

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow], history: Tensor) -> Sampled:
        """One token a row. `history` is the token pool; `logits` is float32 and may be changed.

        Log-probabilities are the model's own, before grammar, penalties, bias and temperature.
        """
        raw = torch.log_softmax(logits, -1) if any(row.occupant.params.logprobs is not None for row in rows) else None
        _keep_allowed(logits, rows)
        self._hold_back_ends(logits, rows)
        _add_bias(logits, rows)
        _penalise(logits, rows, history)
        tokens = logits.argmax(-1)
        random = [index for index, row in enumerate(rows) if row.occupant.params.temperature >= _GREEDY_BELOW]
        if random:
            tokens[random] = _draw(logits[random], [rows[index] for index in random])
        return Sampled(tokens, _logprobs_of(raw, tokens, rows) if raw is not None else None)

    def _hold_back_ends(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """No end before `min_tokens`, unless a grammar allows nothing else."""
        for index, row in enumerate(rows):
            params = row.occupant.params
            if row.produced < params.min_tokens:
                ends = params.stop_token_ids if params.ignore_eos else [*self._eos, *params.stop_token_ids]
                if row.allows_other_than(ends):
                    logits[index, ends] = float("-inf")


def _keep_allowed(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """-inf for what the grammars of the rows forbid. Tokens beyond the end of a mask are forbidden too."""
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8).to(logits.device)
    bits = packed.view(len(masks), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    allowed = torch.nn.functional.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
    where = list(masks)
    logits[where] = logits[where].masked_fill(~allowed, float("-inf"))


def _add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    for index, row in enumerate(rows):
        bias = row.occupant.params.logit_bias
        if bias:
            logits[index, list(bias)] += torch.tensor(list(bias.values()), device=logits.device)


def _penalise(logits: Tensor, rows: Sequence[SamplingRow], history: Tensor) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    for index, row in enumerate(rows):
        params = row.occupant.params
        if not params.penalised:
            continue
        seen = history[row.slot, : row.position]
        repeated = logits[index, seen]
        factor = params.repetition_penalty
        logits[index, seen] = torch.where(repeated > 0, repeated / factor, repeated * factor)
        counts = torch.bincount(seen[row.occupant.prompt_length :], minlength=logits.shape[1])
        logits[index] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _column(rows: Sequence[SamplingRow], name: str, like: Tensor) -> Tensor:
    values = [getattr(row.occupant.params, name) for row in rows]
    return torch.tensor(values, device=like.device, dtype=torch.float32)[:, None]


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scale by temperature, keep what min-p, top-k and top-p allow, in that order, and invert the cumulative sum.

    The sum runs over the whole vocabulary in its own order: a row's token does not depend on what other rows ask for.
    """
    logits = logits / _column(rows, "temperature", logits)
    min_p = _column(rows, "min_p", logits)
    if bool((min_p > 0).any()):
        floor = logits.amax(-1, keepdim=True) + min_p.log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if any(row.occupant.params.top_k or row.occupant.params.top_p < 1.0 for row in rows):
        logits = _keep_top(logits, rows)
    return _invert(torch.softmax(logits, -1), [uniform(row.occupant.seed, row.position) for row in rows])


def _keep_top(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """-inf for what lies below the k-th best logit, then for what lies below the last one that top-p needs.

    Both cut by value: tokens that tie with the last one kept are kept. Sorting goes only as deep as the largest top-k.
    """
    vocab = logits.shape[1]
    limits = [min(row.occupant.params.top_k or vocab, vocab) for row in rows]
    best = logits.topk(max(limits), dim=-1).values
    last = torch.tensor(limits, device=logits.device)[:, None] - 1
    kept = logits.masked_fill(logits < best.gather(1, last), float("-inf"))
    if all(row.occupant.params.top_p == 1.0 for row in rows):
        return kept
    probabilities = (best - kept.logsumexp(-1, keepdim=True)).exp()
    before = probabilities.cumsum(-1) - probabilities
    needed = (before < _column(rows, "top_p", logits)).sum(-1, keepdim=True).clamp_(min=1) - 1
    return kept.masked_fill(kept < best.gather(1, needed), float("-inf"))


def _invert(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """The first column whose cumulative probability exceeds the draw; never one of probability zero."""
    cumulative = probabilities.double().cumsum(-1)
    targets = torch.tensor(draws, dtype=torch.float64, device=probabilities.device)[:, None] * cumulative[:, -1:]
    columns = torch.searchsorted(cumulative, targets, right=True).clamp_(max=probabilities.shape[1] - 1)
    possible = probabilities.gather(1, columns) > 0
    return torch.where(possible, columns, probabilities.argmax(-1, keepdim=True))[:, 0]


def _logprobs_of(raw: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, Tensor]:
    most = max(row.occupant.params.logprobs or 0 for row in rows)
    values, ids = raw.topk(most, dim=-1)
    return raw.gather(1, tokens[:, None])[:, 0], values, ids
