"""States lie by place: a sequence finds its own, a copy is as good, and rows that only fill up a batch harm nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import LOGIT_NOISE, Reference

References = Callable[[str], Reference]

SEATS, BLOCKS, CUT = 3, list(range(8)), 25


@pytest.fixture(params=["qwen3_next", "deepseek_v4"])
def reference(request: pytest.FixtureRequest, references: References) -> Reference:
    return references(request.param)


@pytest.fixture
def runner(reference: Reference) -> TorchRunner:
    config = EngineConfig(max_num_seqs=SEATS)
    model = load_model(config, Checkpoint(reference.folder), Solo(), progress=lambda done, total: None)
    return make_runner(config, model, Sizes(num_blocks=64, max_model_len=128))


def logits(runner: TorchRunner, slot: int, tokens: list[int], start: int, stop: int, admit: bool) -> Tensor:
    """Of some positions of a sequence, whose keys and values are in BLOCKS whichever slot it is in."""
    admissions = [Admission(slot, len(tokens), tokens, 0, SamplingParams())] if admit else []
    plan = StepPlan(1, admissions, [slot], [start], [stop - start], [0], [(slot, BLOCKS)] if admit else [])
    with torch.inference_mode():
        inputs = runner.batch.prepare(plan)
        return runner.model.scores(runner.model(inputs.tokens, inputs.positions, inputs.attention))


def test_a_copied_state_goes_on_in_another_place(reference: Reference, runner: TorchRunner) -> None:
    prompt = reference.prompts[-1]
    logits(runner, 0, prompt, 0, CUT, admit=True)
    runner.model.kept.copy(torch.tensor([0]), torch.tensor([2]), apart=True)
    logits(runner, 0, prompt, CUT, CUT + 5, admit=False)
    resumed = logits(runner, 2, prompt, CUT, len(prompt), admit=True)
    torch.testing.assert_close(resumed, reference.logits[CUT:], atol=LOGIT_NOISE, rtol=0)


def test_a_place_that_was_not_copied_to_has_another_state(reference: Reference, runner: TorchRunner) -> None:
    """Or the test above would prove nothing."""
    prompt = reference.prompts[-1]
    logits(runner, 0, prompt, 0, CUT, admit=True)
    resumed = logits(runner, 2, prompt, CUT, len(prompt), admit=True)
    assert (resumed - reference.logits[CUT:]).abs().max() > 0.1


def test_a_sequence_begins_anew_where_another_was(reference: Reference, runner: TorchRunner) -> None:
    prompt = reference.prompts[-1]
    logits(runner, 1, prompt[::-1], 0, CUT, admit=True)
    for layer in runner.model.layers:
        for state in layer.mixer.states():
            state[1] *= float("nan")
    begun = [logits(runner, 1, prompt, 0, 1, admit=True), logits(runner, 1, prompt, 1, len(prompt), admit=False)]
    torch.testing.assert_close(torch.cat(begun), reference.logits, atol=LOGIT_NOISE, rtol=0)


def test_rows_that_fill_up_a_batch_have_a_place_of_their_own(reference: Reference, runner: TorchRunner) -> None:
    """As graphs fill them up: looked up on the device alone."""
    prompt, spare = reference.prompts[-1], runner.batch.spare_slot
    logits(runner, 0, prompt, 0, CUT, admit=True)
    slots, positions = torch.tensor([0, spare, spare]), torch.tensor([CUT, 0, 0])
    with torch.inference_mode():
        tokens, attention = runner.batch.decode_inputs(slots, positions, uneven=False, apart=True)
        scores = runner.model.scores(runner.model(tokens, positions, attention))
    torch.testing.assert_close(scores[0], reference.logits[CUT], atol=LOGIT_NOISE, rtol=0)
    after = logits(runner, 0, prompt, CUT + 1, len(prompt), admit=False)
    torch.testing.assert_close(after, reference.logits[CUT + 1 :], atol=LOGIT_NOISE, rtol=0)


def test_models_without_states_have_none_to_copy(references: References) -> None:
    for name in ("llama", "deepseek_v32"):
        model = load_model(EngineConfig(), Checkpoint(references(name).folder), Solo(), lambda done, total: None)
        model.allocate_states(5)
        model.kept.copy(torch.tensor([0]), torch.tensor([1]), apart=True)
        assert model.state_bytes_per_place == 0
        assert all(layer.mixer.states() == [] for layer in model.layers)


def test_room_for_as_many_sequences_is_kept_and_empty_again(reference: Reference) -> None:
    """A GPU has no memory for states twice, once its cache is there."""
    model = load_model(EngineConfig(), Checkpoint(reference.folder), Solo(), lambda done, total: None)
    model.allocate_states(5)
    held = [state for layer in model.layers for state in layer.mixer.states()]
    for state in held:
        state.fill_(1)
    model.allocate_states(5)
    again = [state for layer in model.layers for state in layer.mixer.states()]
    assert held
    assert [state.data_ptr() for state in again] == [state.data_ptr() for state in held]
    assert not any(state.any() for state in again)
    model.allocate_states(6)
    assert {len(state) for layer in model.layers for state in layer.mixer.states()} == {6}
