"""What a rank takes in with a plan: requests, several at once, and the blocks of their tables."""

from __future__ import annotations

import torch

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.kernels.sampling_table import pack
from phalanx.runtime.batch import Batch, tensor_of

ASKED = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)


def test_requests_come_in_together_each_to_its_slot() -> None:
    batch = Batch(4, 8, 2, 0, torch.device("cpu"))
    admissions = [Admission(3, 2, [7, 8, 9], 11, ASKED), Admission(0, 1, [5], 12, SamplingParams(temperature=0))]
    batch.update(StepPlan(1, admissions, [], [], [], [], []))
    assert batch.tokens.tolist() == [[5, *[0] * 8], [0] * 9, [0] * 9, [7, 8, 9, *[0] * 6], [0] * 9]
    assert torch.equal(batch.sampling[3], pack(0.5, 3, 0.9, 0.1, 11))
    assert torch.equal(batch.sampling[0], pack(0, SamplingParams().top_k, 1, 0, 12))
    assert not batch.sampling[[1, 2, 4]].any()
    assert [occupant and occupant.prompt_length for occupant in batch.occupants] == [1, None, None, 2]


def test_who_takes_a_slot_over_starts_with_an_empty_table() -> None:
    batch = Batch(2, 8, 2, 9, torch.device("cpu"))
    for blocks in ([4, 5], [6]):
        admission = Admission(1, 2, [1, 2], 0, ASKED)
        batch.update(StepPlan(1, [admission], [1], [0], [2], [True], [(1, blocks)]))
    inputs, attention = batch.decode_inputs(torch.tensor([1]), torch.tensor([1]), uneven=True)
    assert inputs.tolist() == [2]
    assert attention.write_to.tolist() == [6 * 2 + 1]
    assert attention.decode is not None
    assert attention.decode.uneven


def test_numbers_of_any_count_become_a_tensor() -> None:
    for values in ([], [3], [2**62, -1, 0]):
        assert torch.equal(tensor_of(values), torch.tensor(values, dtype=torch.int64))
