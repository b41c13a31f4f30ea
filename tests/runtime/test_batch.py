"""What a rank takes in with a plan: requests, several at once, and the blocks of their tables."""

from __future__ import annotations

import torch

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.kernels.lookup import keep_sampled
from phalanx.kernels.sampling_table import TOKEN, pack
from phalanx.runtime.batch import Batch, tensor_of

ASKED = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)


def test_requests_come_in_together_each_to_its_slot() -> None:
    batch = Batch(4, 8, 2, 5, torch.device("cpu"))
    admissions = [Admission(3, 2, [7, 8, 9], 11, ASKED), Admission(0, 1, [5], 12, SamplingParams(temperature=0))]
    batch.take_in(batch.read(StepPlan(1, admissions, [], [], [], [], [(3, [4, 1]), (0, [2])])))
    assert batch.tokens.kept.view(-1, 2).tolist() == [[0, 0], [9, 0], [5, 0], [0, 0], [7, 8], [0, 0]]
    assert batch.sampling[3].tolist() == pack(0.5, 3, 0.9, 0.1, 11)
    assert batch.sampling[0].tolist() == pack(0, SamplingParams().top_k, 1, 0, 12)
    assert not batch.sampling[[1, 2, 4]].any()
    assert [occupant and occupant.prompt_length for occupant in batch.occupants] == [1, None, None, 2]


def test_who_takes_a_slot_over_starts_with_an_empty_table() -> None:
    batch = Batch(2, 8, 2, 9, torch.device("cpu"))
    for blocks in ([4, 5], [6]):
        admission = Admission(1, 2, [1, 2], 0, ASKED)
        batch.take_in(batch.read(StepPlan(1, [admission], [1], [0], [2], [1], [(1, blocks)])))
    inputs, attention = batch.decode_inputs(torch.tensor([1]), torch.tensor([1]), uneven=True, apart=True)
    assert inputs.tolist() == [2]
    assert attention.write_to.tolist() == [6 * 2 + 1]
    assert attention.decode is not None
    assert attention.decode.uneven


def test_a_sampled_token_finds_its_place_when_its_key_does() -> None:
    """Until then it is the slot's latest; a token that only the engine knows of takes its place."""
    batch, slot = Batch(2, 8, 2, 9, torch.device("cpu")), torch.tensor([1])
    batch.take_in(batch.read(StepPlan(1, [Admission(1, 2, [1, 2], 0, ASKED)], [1], [0], [2], [1], [(1, [4])])))
    keep_sampled(batch.tokens, slot, torch.tensor([2]), torch.tensor([7], dtype=TOKEN))
    batch.take_in(batch.read(StepPlan(2, [], [1], [2], [1], [1], [(1, [6])])))
    assert batch.decode_inputs(slot, torch.tensor([2]), uneven=False, apart=True)[0].tolist() == [7]
    assert batch.seen(torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2])).tolist() == [1, 2, 7]
    batch.take_in(batch.read(StepPlan(3, [], [1], [2], [2], [2], [], told=[(1, 2, [8, 9])])))
    rows = batch.prepare(StepPlan(4, [], [1], [2], [2], [2], []))
    assert rows.tokens.tolist() == [8, 9]
    assert rows.attention.write_to.tolist() == [12, 13]
    assert rows.wanted.tolist() == [0, 1]
    assert rows.attention.decode is not None
    assert rows.attention.decode.positions.tolist() == [2, 3], "drafts are computed as if each were the last one"


def test_memory_does_not_grow_with_the_longest_sequence_but_for_its_table() -> None:
    short, long = (Batch(4, length, 16, 100, torch.device("cpu")) for length in (1_600, 1_600_000))
    assert short.tokens.kept.shape == long.tokens.kept.shape
    assert long._tables.nbytes == 4 * 5 * 100_000


def test_numbers_of_any_count_become_a_tensor() -> None:
    for values in ([], [3], [2**62, -1, 0]):
        assert torch.equal(tensor_of(values), torch.tensor(values, dtype=torch.int64))
