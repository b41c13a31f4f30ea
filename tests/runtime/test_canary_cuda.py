"""The canary on a GPU: digests inside graphs, weights that flip, numbers that break."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.errors import EngineDeadError, RequestError
from phalanx.kernels.digest import row_digest
from phalanx.kernels.sampling import flag_broken, likeliest
from phalanx.layers.watch import Canary
from phalanx.runtime.weight_watch import WeightWatch
from tests.faults import flip_bit

pytestmark = pytest.mark.cuda

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_digests_are_those_of_a_cpu_and_broken_rows_are_flagged() -> None:
    rows = torch.randn(7, 256)
    here, there = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64, device="cuda")
    row_digest(rows, here)
    row_digest(rows.cuda(), there)
    assert int(here) == int(there)
    scores = torch.randn(3, 5000, device="cuda")
    scores[0], scores[2, 4000] = float("nan"), float("inf")
    for given in (scores, scores.bfloat16()):
        told = flag_broken(likeliest(scores), given).tolist()
        assert (told[0], told[2]) == (-1, -1)
        assert told[1] == int(scores[1].argmax())


def test_two_ranks_on_one_gpu_agree_in_graphs_and_name_what_breaks(tiny_llama: Path) -> None:
    options = {"device": "cuda", "share_gpus": True, "dtype": "fp32", "num_blocks": 60}
    with LLM(tiny_llama, tp=2, progress=False, **options) as llm:  # type: ignore[arg-type]
        wanted = llm.generate([3, 5, 8], GREEDY).token_ids
        model = llm.engine.runner.runner.model  # type: ignore[attr-defined]
        assert isinstance(model.watch, Canary)
        assert model.watch.marks[-2:].all()
        weight = model.layers[1].mixer.output.product.weight
        saved = weight.clone()
        weight.fill_(3e38)
        with pytest.raises(RequestError, match=r"in layer 1\."):
            llm.generate([5, 6, 7], GREEDY)
        weight.copy_(saved)
        assert llm.generate([3, 5, 8], GREEDY).token_ids == wanted
        flip_bit(weight, 5)
        with pytest.raises(EngineDeadError, match=r"layers\.1\.self_attn\.o_proj\.weight on rank 0"):
            one_pass(llm.engine.runner.runner.weights)  # type: ignore[attr-defined]


def one_pass(watch: WeightWatch) -> None:
    for _ in range(watch.steps):
        reading = watch.read()
        torch.cuda.synchronize()
        if reading is not None:
            watch.check(reading)
