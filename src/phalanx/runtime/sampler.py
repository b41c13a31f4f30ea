"""Sampling: from logits to tokens, each row by its own parameters and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.plan import TokenLogprobs
from phalanx.kernels.sampling import GREEDY_BELOW, draw, likeliest
from phalanx.runtime.batch import Batch, Occupant


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
    def is_drawn(self) -> bool:
        return self.occupant.params.temperature >= GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Nothing changes the scores or reports them."""
        params = self.occupant.params
        changed = params.penalised or params.logit_bias or self.produced < params.min_tokens or self.mask is not None
        return not changed and params.logprobs is None

    def allows_other_than(self, tokens: Sequence[int]) -> bool:
        if self.mask is None:
            return True
        return int.from_bytes(self.mask, "little") & ~sum(1 << token for token in set(tokens)) != 0


@dataclass(frozen=True)
class Sampled:
    """Tokens, and log-probabilities if some were asked for: (sampled, top values, top ids) of the rows not plain."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None

    def start_reading(self) -> Sampled:
        """A copy on its way to the host behind the step that made it, and ahead of the next one.

        It may be read once the device has come that far.
        """
        if not self.tokens.is_cuda:
            return self
        tokens = self.tokens.to("cpu", non_blocking=True)
        parts = None if self.logprobs is None else tuple(part.to("cpu", non_blocking=True) for part in self.logprobs)
        return Sampled(tokens, parts)  # type: ignore[arg-type]

    def read(self, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
        if self.logprobs is None:
            return self.tokens.tolist(), [None] * len(rows)
        of_special = zip(*(part.tolist() for part in self.logprobs), strict=True)
        read: list[TokenLogprobs | None] = []
        for row in rows:
            if row.is_plain:
                read.append(None)
                continue
            chosen, values, ids = next(of_special)
            wanted = row.occupant.params.logprobs
            top = list(zip(ids, values, strict=True))[:wanted]
            read.append(None if wanted is None else TokenLogprobs(chosen, top))
        return self.tokens.tolist(), read


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = list(eos_token_ids)

    def __call__(
        self, scores: Tensor, rows: Sequence[SamplingRow], batch: Batch, plain_tokens: Tensor | None = None
    ) -> Sampled:
        """One token a row, which also goes into the batch's pool. `scores` may be changed.

        `plain_tokens` are those of the plain rows, where they have been chosen and put into the pool already.
        """
        special = [index for index, row in enumerate(rows) if not row.is_plain]
        if special and len(special) == len(rows):
            return self._sample_special(scores, rows, batch)
        tokens = _choose(scores, rows, batch) if plain_tokens is None else plain_tokens
        if not special:
            return Sampled(tokens, None)
        (where,) = batch.send(torch.tensor(special))
        of_special = self._sample_special(scores[where], [rows[index] for index in special], batch)
        return Sampled(tokens.index_copy(0, where, of_special.tokens), of_special.logprobs)

    def _sample_special(self, scores: Tensor, rows: Sequence[SamplingRow], batch: Batch) -> Sampled:
        """Log-probabilities are the model's own, before grammar, penalties, bias and temperature."""
        scores = scores.float()
        reported = any(row.occupant.params.logprobs is not None for row in rows)
        raw = torch.log_softmax(scores, -1) if reported else None
        self._adjust(scores, rows, batch)
        tokens = _choose(scores, rows, batch)
        return Sampled(tokens, _logprobs_of(raw, tokens, rows) if raw is not None else None)

    def _adjust(self, scores: Tensor, rows: Sequence[SamplingRow], batch: Batch) -> None:
        """Grammar, minimum length, bias and penalties. What is sent to the device here, nobody waits for."""
        _keep_allowed(scores, rows, batch)
        vocab, flat = scores.shape[1], scores.view(-1)
        held = [index * vocab + end for index, row in enumerate(rows) for end in self._held_back(row) if end < vocab]
        if held:
            (places,) = batch.send(torch.tensor(held))
            flat.index_fill_(0, places, float("-inf"))
        bias = {
            index * vocab + token: value
            for index, row in enumerate(rows)
            for token, value in row.occupant.params.logit_bias.items()
        }
        if bias:
            values = torch.tensor(list(bias.values()), dtype=torch.float64)
            places, bits = batch.send(torch.tensor(list(bias)), values.view(torch.int64))
            flat.index_add_(0, places, bits.view(torch.float64).float())
        for row, own in zip(rows, scores, strict=True):
            if row.occupant.params.penalised:
                _penalise(own, row, batch.tokens[row.slot, : row.position])

    def _held_back(self, row: SamplingRow) -> list[int]:
        """No end before `min_tokens`, unless a grammar allows nothing else."""
        params = row.occupant.params
        if row.produced >= params.min_tokens:
            return []
        ends = params.stop_token_ids if params.ignore_eos else [*self._eos, *params.stop_token_ids]
        return ends if row.allows_other_than(ends) else []


def _choose(scores: Tensor, rows: Sequence[SamplingRow], batch: Batch) -> Tensor:
    """Each row's token by the parameters of its slot, into the pool."""
    slots, positions = batch.send(
        torch.tensor([row.slot for row in rows]), torch.tensor([row.position for row in rows])
    )
    drawn = any(row.is_drawn for row in rows)
    tokens = draw(scores, batch.sampling, slots, positions) if drawn else likeliest(scores)
    batch.tokens[slots, positions] = tokens
    return tokens


def _keep_allowed(scores: Tensor, rows: Sequence[SamplingRow], batch: Batch) -> None:
    """-inf for what the grammars of the rows forbid. Tokens beyond the end of a mask are forbidden too."""
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return
    vocab, size = scores.shape[1], len(next(iter(masks.values())))
    packed = torch.frombuffer(bytearray(b"".join(masks.values()) + bytes(8)), dtype=torch.uint8)
    words, where = batch.send(packed[: len(packed) // 8 * 8].view(torch.int64), torch.tensor(list(masks)))
    octets = words.view(torch.uint8)[: size * len(masks)].view(len(masks), -1, 1)
    bits = octets >> torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = torch.nn.functional.pad((bits & 1).flatten(1)[:, :vocab].bool(), (0, max(0, vocab - 8 * size)))
    scores[where] = scores[where].masked_fill(~allowed, float("-inf"))


def _penalise(scores: Tensor, row: SamplingRow, seen: Tensor) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    params = row.occupant.params
    repeated, factor = scores[seen], params.repetition_penalty
    scores[seen] = torch.where(repeated > 0, repeated / factor, repeated * factor)
    said = seen[row.occupant.prompt_length :]
    counts = torch.zeros_like(scores).index_add_(0, said, torch.ones_like(said, dtype=scores.dtype))
    scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _logprobs_of(raw: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, Tensor]:
    most = max(row.occupant.params.logprobs or 0 for row in rows)
    values, ids = raw.topk(most, dim=-1)
    return raw.gather(1, tokens[:, None])[:, 0], values, ids
