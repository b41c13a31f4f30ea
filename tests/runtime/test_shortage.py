"""Steps without memory: on one rank, on all ranks at the same point, and on some of them only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.request import Request
from phalanx.errors import EngineDeadError, RequestError
from phalanx.runtime import workers
from phalanx.runtime.runner import TorchRunner, is_out_of_memory
from tests.conftest import NEW_TOKENS, Reference
from tests.forked import forked_rank
from tests.runtime.short_rank import run_short

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 60, "max_model_len": 160, "max_num_seqs": 6}


def all_of(llm: LLM, prompts: list[list[int]]) -> list[Request]:
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    return requests


def ended(requests: list[Request]) -> list[int]:
    return [index for index, request in enumerate(requests) if request.error is not None]


def check_survivors(requests: list[Request], captured: Reference) -> None:
    """One request ended with the cause, the others have the tokens of transformers."""
    (index,) = ended(requests)
    error = requests[index].error
    assert error is not None
    assert error.code == "out_of_memory"
    for request, wanted in zip(requests, captured.continuations, strict=True):
        assert request.error is not None or request.output == wanted


def test_the_others_get_the_tokens_of_transformers(captured: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers have written their keys and values by then, for a chunk of a prompt and for decodes."""
    run_short(4, 2, lambda rank: True, monkeypatch.setattr)
    with LLM(captured.folder, progress=False, **TIGHT) as llm:
        check_survivors(all_of(llm, captured.prompts), captured)


def test_who_asked_in_this_process_hears_the_cause(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_short(2, 0, lambda rank: True, monkeypatch.setattr)
    with LLM(tiny_llama, progress=False, num_blocks=64) as llm:
        with pytest.raises(RequestError, match="ran out of memory") as caught:
            llm.generate([1, 2, 3], GREEDY)
        assert caught.value.code == "out_of_memory"
        assert len(llm.generate([1, 2, 3], GREEDY).token_ids) == NEW_TOKENS


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("illegal memory access"))
    wrapped = RuntimeError("operation failed due to a previous error during capture")
    wrapped.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(wrapped)


def test_other_errors_are_not_taken_for_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(TorchRunner, "_launch", broken)
    with (
        LLM(tiny_llama, progress=False, num_blocks=64) as llm,
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        llm.generate([1, 2, 3], GREEDY)


@pytest.fixture
def short_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started by the module that lets them run short."""
    monkeypatch.setattr(
        workers.child, "start", lambda module, line, variables: forked_rank("tests.runtime.short_rank", line, variables)
    )


@pytest.mark.usefixtures("short_ranks")
def test_ranks_that_give_up_at_the_same_point_go_on(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[3, 5, 8], [*range(40)], [11, 4] * 20]
    with LLM(tiny_llama, progress=False, **TIGHT) as llm:
        wanted = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
    monkeypatch.setenv("SHORT_RANKS", "1@6:2")
    run_short(6, 2, lambda rank: True, monkeypatch.setattr)
    with LLM(tiny_llama, tp=2, progress=False, **TIGHT) as llm:
        requests = all_of(llm, prompts)
        assert ended(requests) == [2]
        assert [request.output for request in requests[:2]] == wanted[:2]
        assert llm.generate(prompts[2], GREEDY).token_ids == wanted[2]


@pytest.mark.usefixtures("short_ranks")
@pytest.mark.parametrize(
    ("tp", "of_workers", "here", "named"),
    [(3, "2@4:1", (0, 0), "rank 2"), (2, "9@4:1", (4, 1), "rank 0"), (2, "1@4:2", (4, 1), "rank 0")],
    ids=["another_rank", "rank_0", "at_different_points"],
)
def test_ranks_that_do_not_give_up_together_end_the_engine_with_the_cause(
    tp: int, of_workers: str, here: tuple[int, int], named: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait in a collective that the others will never come to."""
    monkeypatch.setattr("phalanx.runtime.executor._SHORT_WITHIN_S", 1.0)
    monkeypatch.setenv("SHORT_RANKS", of_workers)
    run_short(*here, lambda rank: True, monkeypatch.setattr)
    with LLM(tiny_llama, tp=tp, progress=False, num_blocks=64) as llm:
        with pytest.raises(EngineDeadError, match=f"ran out of memory on {named}") as caught:
            llm.generate([1, 2, 3], GREEDY)
        assert caught.value.code == "out_of_memory"
        with pytest.raises(EngineDeadError):
            llm.generate([1, 2, 3], GREEDY)
