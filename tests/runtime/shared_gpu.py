"""Run by tests/runtime/test_shared_gpu.py as `python -m tests.runtime.shared_gpu WHAT MODEL`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from phalanx import LLM, SamplingParams
from phalanx.engine.hang import RankSeen, name_hang
from phalanx.engine.marks import StepTraces
from phalanx.engine.tracing import EngineTracer
from phalanx.engine.whereabouts import read_pages
from phalanx.errors import EngineDeadError
from phalanx.runtime.executor import Executor
from phalanx.runtime.stacks import process_state
from phalanx.trace.timeline import effects_before_causes, steps_of

PROMPTS = [[7], [3, 5, 8, 13, 21], [*range(40)], [11, 4] * 60]
OPTIONS = {"device": "cuda", "dtype": "fp32", "max_model_len": 160, "max_num_seqs": 6, "num_blocks": 60}


def tokens(model: str) -> dict[str, object]:
    """Of one rank and of two, the second time in a batch that shrinks."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (32, 20, 32, 9)]
    found: dict[str, object] = {}
    for tp in (1, 2):
        with LLM(model, tp=tp, progress=False, share_gpus=True, **OPTIONS) as llm:
            found[str(tp)] = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
            if tp == 2:
                assert isinstance(llm.engine.runner, Executor)
                found["graphs"] = llm.engine.runner.runner.graphs is not None
    return found


def same_bits(model: str) -> dict[str, object]:
    """Tokens and log-probabilities under `invariant`: of one rank with each prompt alone, of one and of two with all at
    once, the prompts in other chunks.
    """
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)
    found: dict[str, object] = {}
    for dtype in ("fp32", "bf16"):
        for tp, budget, alone in ((1, 256, True), (1, 48, False), (2, 32, False)):
            options = OPTIONS | {"dtype": dtype, "max_num_batched_tokens": budget, "invariant": True}
            with LLM(model, tp=tp, progress=False, share_gpus=True, **options) as llm:
                asked = [[prompt] for prompt in PROMPTS] if alone else [PROMPTS]
                answers = [answer for prompts in asked for answer in llm.generate(prompts, params)]
            found[f"{dtype} {tp} {'alone' if alone else 'together'}"] = [
                [answer.token_ids, [each.sampled for each in answer.logprobs or []]] for answer in answers
            ]
    return found


def traced(model: str) -> dict[str, object]:
    """Two ranks whose kernels of collectives stamp. How early a rank left one, at most: before another came, in ns."""
    params, told = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), list[StepTraces]()
    with LLM(model, tp=2, progress=False, share_gpus=True, **OPTIONS) as llm:
        plain = [answer.token_ids for answer in llm.generate(PROMPTS, params, salt="plain")]
        EngineTracer(llm.engine, 12, told.append)
        answers = [answer.token_ids for answer in llm.generate(PROMPTS, params, salt="traced")]
    steps = steps_of(told[0])
    return {
        "same": answers == plain,
        "layers": len(told[0].ranks[0].parts),
        "calls": [[call.kind for call in step.calls] for step in steps],
        "decodes": [not step.has_prompts for step in steps],
        "took": min(
            left - came
            for step in steps
            for call in step.calls
            for came, left in zip(call.came, call.left, strict=True)
        ),
        "early": max((early for _, early in effects_before_causes(steps)), default=0),
        "uncertain": sum(rank.uncertain for rank in told[0].ranks),
    }


def stopped(model: str) -> dict[str, object]:
    """Rank 1's process stops between steps: rank 0's kernels wait on the GPU, in a graph, for its flags."""
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(model, tp=2, progress=False, share_gpus=True, **OPTIONS) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Executor)
        request = llm.engine.add(PROMPTS[1], long)
        for _ in range(8):
            llm.engine.step()
        pid = runner.workers.processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=lambda: [llm.engine.step() for _ in range(1000) if llm.engine.has_work])
        thread.start()
        time.sleep(2)
        assert runner.where.look is not None
        assert runner.workers.pages is not None
        runner.where.look()
        pages = read_pages(runner.workers.pages)
        hang = name_hang({rank: RankSeen(where, state=process_state(where.pid)) for rank, where in enumerate(pages)})
        os.kill(pid, signal.SIGCONT)
        thread.join(60)
        assert hang is not None
        return {"code": hang.code, "ranks": hang.ranks, "found": hang.found, "tokens": len(request.output)}


def killed(model: str) -> dict[str, object]:
    """Rank 1 dies between steps; rank 0 then waits on its own device for a rank that never comes."""
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(model, tp=2, progress=False, share_gpus=True, **OPTIONS) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Executor)
        llm.engine.add(PROMPTS[1], long)
        for _ in range(8):
            llm.engine.step()
        os.kill(runner.workers.processes[1].pid, signal.SIGKILL)
        try:
            llm.generate(PROMPTS[0], long)
        except EngineDeadError as error:
            found: dict[str, object] = {"code": error.code, "found": error.found}
        else:
            raise AssertionError("went on without rank 1")
    with LLM(model, progress=False, **OPTIONS) as llm:
        answer = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return found | {"tokens": answer.token_ids}


if __name__ == "__main__":
    print(
        json.dumps(
            {"tokens": tokens, "bits": same_bits, "traced": traced, "stopped": stopped, "killed": killed}[sys.argv[1]](
                sys.argv[2]
            )
        )
    )
