"""Real engines, traced: every rank's parts and collectives, the same tokens, and nothing left behind."""

from __future__ import annotations

from contextlib import closing
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from rich.console import Console

from phalanx import LLM, SamplingParams
from phalanx.engine.marks import StepTraces
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.tracing import EngineTracer, Traceable, repeated_tokens
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.executor import Executor
from phalanx.runtime.start import start_engine
from phalanx.runtime.tracer import Tracer
from phalanx.trace.summary import show
from phalanx.trace.timeline import effects_before_causes, steps_of
from tests.runtime.test_stored_on_cpu import gguf_of, needs_compiler

pytestmark = pytest.mark.usefixtures("forked_ranks")

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
PROMPTS = [list(range(1, 40)), list(range(50, 70))]


def test_two_ranks_tell_parts_collectives_and_clocks(tiny_llama: Path) -> None:
    with LLM(tiny_llama, tp=2, progress=False, max_model_len=128) as llm:
        engine, runner = llm.engine, llm.engine.runner
        assert isinstance(runner, Executor)
        plain = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, salt="plain")]
        page, told = runner.where, list[StepTraces]()
        runner.nodes = ["here", "there"]
        EngineTracer(engine, 5, told.append)
        assert isinstance(runner.where, Tracer)
        traced = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, salt="traced")]
        assert traced == plain

        (traces,) = told
        steps = steps_of(traces)
        assert [step.host.step for step in steps] == list(range(steps[0].host.step, steps[0].host.step + 5))
        assert [step.has_prompts for step in steps] == [True, False, False, False, False]
        spec = runner.runner.model.place.spec
        layers, hidden = len(spec.layers), spec.hidden
        for step in steps:
            rows = step.host.decodes + step.host.prompt_tokens
            kinds = [call.kind for call in step.calls]
            assert kinds == ["all-reduce"] * (2 * layers + 1) + ["gather"]
            assert all(call.size == rows * hidden * 4 for call in step.calls[: 2 * layers - 1])
            for rank in step.ranks:
                names = [part.name for part in rank.slices]
                middle = ["attention", "FFN"] * layers
                assert names == ["prepare", "embedding", *middle, "head", "sampling", "read tokens"]
                assert [part.begun for part in rank.slices[1:]] == [part.ended for part in rank.slices[:-1]]
        assert not list(effects_before_causes(steps))
        assert abs(traces.ranks[1].ahead) <= traces.ranks[1].uncertain
        assert traces.ranks[0].ahead == traces.ranks[0].uncertain == 0
        assert [rank.node for rank in traces.ranks] == ["here", "there"]
        assert [rank.pace for rank in traces.ranks] == [None, None], "ranks of one machine measure no link"

        assert runner.where is page
        for hooked in (runner, engine.scheduler, runner.runner.model, page):
            assert not {"launch", "collect", "schedule", "apply", "scores"} & set(vars(hooked))
        assert "all_reduce" not in vars(runner.runner.model.place.group)
        assert type(runner.runner.sampler).__name__ == "Sampler"


def test_a_trace_may_end_early_and_is_bounded(tiny_llama: Path) -> None:
    with LLM(tiny_llama, progress=False, max_model_len=128) as llm:
        engine = llm.engine
        tracer = EngineTracer(engine, 10**9, lambda traces: None)
        assert tracer._steps == 64
        assert steps_of(tracer.end()) == []
        engine.add(PROMPTS[0], PARAMS)
        tracer = EngineTracer(engine, 64, lambda traces: None)
        engine.step()
        traces = tracer.end()
        assert len(steps_of(traces)) == 1
        assert not steps_of(traces)[0].calls
        assert traces.prompt_tokens == len(PROMPTS[0])


@needs_compiler
def test_layers_that_a_cpu_computes_in_one_call_tell_their_halves(tmp_path: Path) -> None:
    """A decode of panels is one call a layer, but for the last one."""
    config = EngineConfig(device="cpu", max_num_seqs=2, num_blocks=16)
    with closing(start_engine(config, gguf_of(tmp_path, "llama", Kind.Q4_1), lambda done, total: None)) as engine:
        told = list[StepTraces]()
        engine.add([5, 7, 11], PARAMS)
        engine.step()
        layers = engine.runner.model.layers  # type: ignore[attr-defined]
        EngineTracer(engine, 3, told.append)
        while not told:
            engine.step()
        assert [layer.whole is not None for layer in layers] == [True, False]
        assert not any("in_one_call" in vars(layer) for layer in layers)
    for step in steps_of(told[0]):
        parts = [part for part in step.ranks[0].slices if part.layer is not None]
        assert [(part.name, part.layer) for part in parts] == [
            ("attention", 0), ("FFN", 0), ("attention", 1), ("FFN", 1)
        ]  # fmt: skip
        assert all(part.ended > part.begun for part in parts)
    output = StringIO()
    show(steps_of(told[0]), Console(file=output))
    assert "3 decode steps on 1 rank," in output.getvalue()


def test_a_modelled_runner_has_nothing_to_trace() -> None:
    assert not isinstance(ModelledRunner(lambda plan: 0.0), Traceable)


def test_what_a_cache_could_have_found() -> None:
    shared = list(range(32))
    assert repeated_tokens([shared, shared, [*shared[:16], 99, *shared[17:]]], 16) == 32 + 16
    assert repeated_tokens([[1] * 15, [1] * 15], 16) == 0
    assert repeated_tokens([[1] * 16 + [2] * 16, [3] * 16 + [2] * 16], 16) == 0


@pytest.mark.cuda
def test_graphs_tell_their_parts(tiny_llama: Path) -> None:
    """On a GPU: decodes run in graphs whose kernels stamp; the same tokens; all parts in order, by the host's clock."""
    with LLM(tiny_llama, progress=False, max_model_len=128, num_blocks=60, device="cuda") as llm:
        plain = llm.generate(PROMPTS, PARAMS, salt="plain")
        told = list[StepTraces]()
        EngineTracer(llm.engine, 7, told.append)
        traced = llm.generate(PROMPTS, PARAMS, salt="traced")
        assert [answer.token_ids for answer in traced] == [answer.token_ids for answer in plain]
        assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, salt="behind")] == [
            answer.token_ids for answer in plain
        ]
    (rank,) = told[0].ranks
    steps = steps_of(told[0])
    decodes = [step for step in steps if not step.has_prompts]
    assert rank.in_graphs >= len(decodes) >= 3
    for step in steps:
        parts = step.ranks[0].slices
        middle = ["attention", "FFN"] * len(rank.parts)
        assert [part.name for part in parts] == ["embedding", *middle, "head", "sampling", "read tokens"]
        assert all(part.ended >= part.begun for part in parts)
        assert parts[0].begun < parts[-1].begun
    for first, second in pairwise(steps):
        assert first.ranks[0].ended < second.ranks[0].begun, "of two that are on their way each has its own stamps"
    assert 0 < rank.uncertain < 10**8, "in ns; on a GPU that others use too its clock is read late"
    for step in rank.steps:
        assert step.begun - rank.uncertain < step.marks[0].time
        assert step.marks[-1].time < step.ended + rank.uncertain
