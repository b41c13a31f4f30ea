"""The gated delta rule and its convolution: what transformers computes, wherever a sequence is cut."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    l2norm,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta import DeltaRows, convolve, delta_rule, gated_norm, prompts_of, unit_length
from phalanx.kernels.delta_weights import CHUNK, PendingUpdates
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows, PrefillTiles, tile_prompt

HEADS, K_DIM, V_DIM, CHANNELS, KERNEL = 3, 8, 5, 14, 4
PLACES = 6
LONG = 2 * CHUNK + 7


def random_rows(tokens: int) -> DeltaRows:
    """States that remember some thirty tokens."""
    q, k = (unit_length(torch.randn(tokens, HEADS, K_DIM)) for _ in range(2))
    decay = -0.06 * torch.rand(tokens, HEADS)
    return DeltaRows(q * K_DIM**-0.5, k, torch.randn(tokens, HEADS, V_DIM), decay, torch.rand(tokens, HEADS))


def dirty(*shape: int) -> Tensor:
    """Places as others left them, from which nothing may come of a sequence that begins."""
    return torch.full((PLACES, *shape), float("nan"))


def batch_of(*rows: tuple[int, int, int]) -> AttentionBatch:
    """Of (slot, start, count), those of one token first."""
    singles = [row for row in rows if row[2] == 1]
    slots, starts = (torch.tensor([row[column] for row in singles]) for column in (0, 1))
    prompts, first = [], len(singles)
    for slot, start, count in rows[len(singles) :]:
        prompts.append(PrefillRow(first, count, start, torch.empty(0), slot))
        first += count
    decode = DecodeRows(torch.empty(0), slots, starts) if singles else None
    return AttentionBatch(torch.empty(0), decode, prompts)


def whole(rows: DeltaRows, rule: object) -> tuple[Tensor, Tensor]:
    """What transformers reads of a sequence from its start, and the state behind it; it scales queries itself."""
    q, k, v, g, beta = (part[None] for part in rows)
    read, state = rule(q * K_DIM**0.5, k, v, g=g, beta=beta, output_final_state=True)  # type: ignore[operator]
    return read[0], state[0]


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, LONG])
def test_a_prompt_reads_what_transformers_reads(rule: object, tokens: int) -> None:
    rows, states = random_rows(tokens), dirty(HEADS, K_DIM, V_DIM)
    read, state = whole(rows, rule)
    torch.testing.assert_close(delta_rule(rows, states, batch_of((2, 0, tokens))), read, atol=1e-5, rtol=0)
    torch.testing.assert_close(states[2], state, atol=1e-5, rtol=0)
    assert states[[0, 1, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize("tokens", [9, LONG])
def test_a_sequence_goes_on_from_any_cut(tokens: int) -> None:
    rows = random_rows(tokens)
    read, state = whole(rows, torch_recurrent_gated_delta_rule)
    for cut in range(1, tokens):
        states = dirty(HEADS, K_DIM, V_DIM)
        before = delta_rule(rows.span(0, cut), states, batch_of((1, 0, cut)))
        after = delta_rule(rows.span(cut, tokens), states, batch_of((1, cut, tokens - cut)))
        torch.testing.assert_close(torch.cat((before, after)), read, atol=1e-5, rtol=0)
        torch.testing.assert_close(states[1], state, atol=1e-5, rtol=0)


def test_a_state_is_not_forgotten() -> None:
    """What comes behind a cut depends on what came before it, or the tests above would prove nothing."""
    rows, states = random_rows(20), dirty(HEADS, K_DIM, V_DIM)
    read, _ = whole(rows, torch_recurrent_gated_delta_rule)
    begun = delta_rule(rows.span(10, 20), states, batch_of((0, 0, 10)))
    assert (begun - read[10:]).abs().amax((1, 2)).min() > 0.05


def test_decodes_beginners_and_prompts_share_a_batch() -> None:
    """In places out of order: a decode, a sequence of one token that begins, a resumed prompt and a new one."""
    lengths = {4: 30, 0: 1, 3: CHUNK + 9, 1: 12}
    sequences = {slot: random_rows(length) for slot, length in lengths.items()}
    states, columns = dirty(HEADS, K_DIM, V_DIM), dirty(KERNEL, CHANNELS)
    inputs = {slot: torch.randn(length, CHANNELS) for slot, length in lengths.items()}
    taps = torch.randn(KERNEL, CHANNELS)
    begun = {4: 29, 0: 0, 3: 5, 1: 0}
    for slot in (4, 3):
        delta_rule(sequences[slot].span(0, begun[slot]), states, batch_of((slot, 0, begun[slot])))
        convolve(inputs[slot][: begun[slot]], taps, columns, batch_of((slot, 0, begun[slot])))
    batch = batch_of(*((slot, start, lengths[slot] - start) for slot, start in begun.items()))
    parts = [sequences[slot].span(start, lengths[slot]) for slot, start in begun.items()]
    read = delta_rule(DeltaRows(*map(torch.cat, zip(*parts, strict=True))), states, batch)
    mixed = convolve(torch.cat([inputs[slot][start:] for slot, start in begun.items()]), taps, columns, batch)
    alone = {slot: whole(rows, torch_recurrent_gated_delta_rule) for slot, rows in sequences.items()}
    torch.testing.assert_close(
        read, torch.cat([alone[slot][0][start:] for slot, start in begun.items()]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        mixed, torch.cat([convolved(inputs[slot], taps)[start:] for slot, start in begun.items()]), atol=1e-5, rtol=0
    )
    for slot in lengths:
        torch.testing.assert_close(states[slot], alone[slot][1], atol=1e-5, rtol=0)


def test_tiles_tell_of_whole_prompts() -> None:
    """Those of one prompt are put together, those that fill up stay apart, and those of no rows are nothing."""
    spans = [(3, 7, 2 * PROMPT_TILE), (1, 0, PROMPT_TILE), (4, 5, 2 * PROMPT_TILE + 1)]
    tiles, first = [(0, 0, 0, 0, 0)], 2
    for place, start, count in spans:
        tiles += tile_prompt(place, first, count, start)
        first += count
    padding = [(PLACES, first + number * PROMPT_TILE, PROMPT_TILE, 0, 0) for number in range(2)]
    cut = PrefillTiles(torch.empty(0), torch.tensor([*tiles, *padding, (0, 0, 0, 0, 0)]), True)
    found = prompts_of(AttentionBatch(torch.empty(0), None, [], cut))
    assert [(row.slot, row.start, row.count) for row in found] == spans + [(PLACES, 0, PROMPT_TILE)] * 2
    assert [row.first for row in found] == [2, 258, 386, *(row[1] for row in padding)]


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """By torch's own convolution, padded with zeros on the left."""
    padded = F.pad(x.t()[None], (len(taps) - 1, 0))
    return F.silu(F.conv1d(padded, taps.t()[:, None], groups=x.shape[1]))[0].t()


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_goes_on_from_any_cut(kernel: int) -> None:
    """Cuts shorter than the kernel too, each of them by one token, or by several."""
    x, taps = torch.randn(11, CHANNELS), torch.randn(kernel, CHANNELS)
    expected = convolved(x, taps)
    for first in range(1, 10):
        for second in range(first + 1, 11):
            kept, out = dirty(kernel, CHANNELS), []
            for start, stop in ((0, first), (first, second), (second, 11)):
                out.append(convolve(x[start:stop], taps, kept, batch_of((3, start, stop - start))))
            torch.testing.assert_close(torch.cat(out), expected, atol=1e-5, rtol=0)


def test_lengths_and_the_gated_norm_are_those_of_transformers() -> None:
    x, gate = torch.randn(4, HEADS, V_DIM), torch.randn(4, HEADS, V_DIM)
    norm = Qwen3NextRMSNormGated(V_DIM, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = norm.to(dtype)(x.to(dtype), gate.to(dtype))
        ours = gated_norm(x.to(dtype).float(), gate.to(dtype), norm.weight, 1e-3, dtype)
        torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(unit_length(x * 1e-3), l2norm(x * 1e-3))


def test_a_sequence_goes_on_behind_any_of_its_rows() -> None:
    """A prompt of one sequence and none of the other, steps of one to nine tokens of each, of which the last ones are
    wrong, with rows that fill up between them, and prompts behind that.
    """
    random, most, tokens, begun = Random(0), 9, CHUNK + 70, {4: 5, 1: 0}
    sequences, inputs = (
        {slot: make() for slot in begun} for make in (lambda: random_rows(tokens), lambda: mixed_of(tokens))
    )
    states, columns, taps = (
        dirty(HEADS, K_DIM, V_DIM),
        dirty(KERNEL - 1 + most, CHANNELS),
        torch.randn(KERNEL, CHANNELS),
    )
    since = torch.full((PLACES, HEADS, V_DIM), 3, dtype=torch.int32)
    pending = PendingUpdates(dirty(most, HEADS, K_DIM + V_DIM + 1), since, most)
    wanted = {
        slot: (whole(sequences[slot], torch_recurrent_gated_delta_rule)[0], convolved(inputs[slot], taps))
        for slot in begun
    }

    def check(batch: AttentionBatch, spans: list[tuple[int, int, int, int]]) -> None:
        """Of (slot, start, count, right): as many as are right come out right, whatever the others are."""
        parts, mixed = [], []
        for slot, start, count, right in spans:
            known = sequences.get(slot, random_rows(1)), inputs.get(slot, mixed_of(1))
            wrong = random_rows(count - right), mixed_of(count - right)
            parts += [known[0].span(start, start + right), wrong[0]]
            mixed += [known[1][start : start + right], wrong[1]]
        read = delta_rule(DeltaRows(*map(torch.cat, zip(*parts, strict=True))), states, batch, pending)
        found, first = (read, convolve(torch.cat(mixed), taps, columns, batch)), 0
        for slot, start, count, right in spans:
            for ours, theirs in zip(found, wanted.get(slot, ()), strict=False):
                torch.testing.assert_close(
                    ours[first : first + right], theirs[start : start + right], atol=1e-5, rtol=0
                )
            first += count

    check(batch_of((4, 0, 5)), [(4, 0, 5, 5)])
    for _ in range(20):
        counts = {slot: random.randint(1, most) for slot in begun}
        spans = [(slot, start, counts[slot], random.randint(1, min(4, counts[slot]))) for slot, start in begun.items()]
        spans = [(PLACES - 1, 0, 1, 1), (PLACES - 1, 0, 1, 1), *spans, (PLACES - 1, 0, 1, 1)]
        rows = [(slot, start + at) for slot, start, count, _ in spans for at in range(count)]
        slots, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
        check(AttentionBatch(torch.empty(0), DecodeRows(torch.empty(PLACES, 1), slots, positions), []), spans)
        begun = {slot: start + right for slot, start, _, right in spans if slot in begun}
    check(
        batch_of(*((slot, start, 20) for slot, start in begun.items())),
        [(slot, start, 20, 20) for slot, start in begun.items()],
    )


def gone_on(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers reads of tokens behind a state, and the state behind them."""
    q, k, v, g, beta = (part[None] for part in rows)
    read, after = torch_recurrent_gated_delta_rule(
        q * K_DIM**0.5, k, v, g=g, beta=beta, initial_state=state[None], output_final_state=True
    )
    return read[0], after[0]


def rounded_as(found: Tensor, state: Tensor) -> Tensor:
    """What was found of a state that was rounded, where last bits decide to either neighbour."""
    torch.testing.assert_close(found, state.to(found.dtype), atol=1e-6, rtol=2**-7)
    assert (found != state.to(found.dtype)).float().mean() < 0.05
    return found.float()


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_state_in_bf16_is_rounded_where_it_is_written_and_nowhere_else(drafts: int) -> None:
    """Tokens of a step that writes it read it, and correct it, as it was before: by transformers, of whose state only
    what is left of the rounding is taken away behind such a step.
    """
    prompt, tokens, most, kept, writes = 20, 60, 1 + drafts, 8, 0
    rows, states = random_rows(tokens), dirty(HEADS, K_DIM, V_DIM).to(torch.bfloat16)
    since = torch.full((PLACES, HEADS, V_DIM), 3, dtype=torch.int32)
    pending = PendingUpdates(dirty(kept, HEADS, K_DIM + V_DIM + 1), since, most)
    wanted, state = gone_on(rows.span(0, prompt), torch.zeros(HEADS, K_DIM, V_DIM))
    read = delta_rule(rows.span(0, prompt), states, batch_of((2, 0, prompt)), pending)
    torch.testing.assert_close(read, wanted, atol=1e-5, rtol=0)
    state = rounded_as(states[2], state)
    for start in range(prompt, tokens - most + 1, most):
        step, before = torch.arange(start, start + most), states[2].clone()
        decode = DecodeRows(torch.empty(PLACES, 1), torch.full_like(step, 2), step, apart=not drafts)
        few = rows.span(start, start + most)
        read = delta_rule(few, states, AttentionBatch(torch.empty(0), decode, []), pending)
        wanted, after = gone_on(few, state)
        torch.testing.assert_close(read, wanted, atol=1e-5, rtol=0)
        if int(since[2, 0, 0]) == start:
            lost = rounded_as(states[2], state) - state
            after, writes = after + few.decay.sum(0).exp()[:, None, None] * lost, writes + 1
        else:
            assert torch.equal(states[2], before)
        state = after
    assert 3 < writes < 20


def mixed_of(tokens: int) -> Tensor:
    return torch.randn(tokens, CHANNELS)


def test_rows_that_fill_up_are_sequences_of_their_own() -> None:
    """Others of one slot are one sequence."""
    firsts, counts = DecodeRows(torch.empty(6, 1), torch.tensor([5, 1, 1, 1, 5, 5, 4]), torch.arange(7)).sequences
    assert firsts.tolist() == [0, 1, 4, 5, 6]
    assert counts.tolist() == [1, 3, 1, 1, 1]
