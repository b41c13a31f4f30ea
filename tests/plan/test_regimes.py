"""Pipelines and data-parallel attention: what each rank holds, what batches wait for, and what engines are told."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
import yaml

from phalanx.cost.allreduce import hand_over_seconds
from phalanx.cost.rules import Rules
from phalanx.cost.work import count_work, pipelined
from phalanx.engine.step_sums import StepSums
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.plan.flow import Flow
from phalanx.plan.predict import predict, predictor
from phalanx.plan.recipes import command, recipe
from phalanx.plan.recipes.launch import trtllm_options
from phalanx.plan.record import launch_of
from phalanx.spec.machine import Machine
from phalanx.spec.network import Link
from phalanx.spec.workload import Workload

OTHERS = ("vllm", "sglang", "trtllm")


def found(plan: Plan, **wanted: object) -> Candidate:
    return next(each for each in plan.candidates if all(getattr(each, name) == wanted[name] for name in wanted))


@pytest.fixture(scope="module")
def cards() -> Plan:
    """Cards on PCIe, a number of them that no TP degree of the model divides."""
    return ask(PlanQuestion("Llama-3.3-70B", "3xRTX3090", formats="awq"))


@pytest.fixture(scope="module")
def latents() -> Plan:
    return ask(PlanQuestion("DeepSeek-V3", "8xH200-SXM", concurrency=512, output_tokens=1024))


def test_a_step_of_a_pipeline_waits_for_its_slowest_stage() -> None:
    """By hand: 80 layers over 3 stages are 27 in the largest, as if there were 81; the head is in one alone."""
    work = count_work(catalog.model("Llama-3.3-70B"), 1, "awq", "bf16")
    made = pipelined(work, 3)
    assert made.layers == 81
    assert isclose(made.linear_bytes / work.linear_bytes, 81 / 80)
    assert made.head_bytes == 3 * work.head_bytes
    assert pipelined(work, 1) is work


def test_activations_go_from_stage_to_stage() -> None:
    """By hand: 10 tokens of 8,192 bf16 numbers in halves over 55 % of 32 GB/s, after 5.5 us, thrice a step."""
    link = Link("pcie", 32e9)
    once = 5.5e-6 + 10 * 8192 * 2 / 2 / (0.55 * 32e9)
    assert isclose(hand_over_seconds(10 * 8192 * 2, 2, link), once)
    spec, box = catalog.model("Llama-3.3-70B"), Machine.parse("6xL40S")
    one, three = (predictor(spec, box, 2, "vllm", Workload(), "fp8", stages=many).limits for many in (1, 3))
    step = StepSums(10, 10_000)
    more = three.of(step).all_reduce - one.of(step).all_reduce * three.work.layers / one.work.layers
    assert isclose(more, 3 * hand_over_seconds(10 * 8192 * 2, 2, box.link(6)), rel_tol=1e-6)


def test_batches_that_move_together_wait_for_each_others_prompts() -> None:
    """Against a roll of dice: a step takes 1 s, with a prompt in any batch 5 s."""
    load = Workload(100, 10, 4, 0.2)

    def price(step: StepSums) -> float:
        return 5.0 if step.prompt_tokens else 1.0

    flow = Flow.of(load, Rules("mixed"), None, price, together=4)
    alone = Flow.of(load, Rules("mixed"), None, price)
    often = (1 / alone.rate(4) * 4 / load.mean_output - 1.0) / 4.0  # the mean step of one batch, as a share of 4 s more
    assert isclose(flow.wait(4), 4.0 * (1 - (1 - often) ** 3), rel_tol=1e-6)
    assert alone.wait(4) == 0
    assert flow.rate(4) < alone.rate(4)


def test_where_all_are_alike_nobody_waits() -> None:
    spec, box = catalog.model("Llama-3.3-70B"), Machine.parse("2xL40S")
    alike, unlike = (
        predict(spec, box, 1, "vllm", Workload(1024, 64, 8, spread), "awq", stages=2).tpot.mid
        / predict(spec, box, 1, "vllm", Workload(1024, 64, 8, spread), "awq").tpot.mid
        for spread in (0.0, 0.2)
    )
    assert alike < 1.1 < unlike


def test_pipelines_are_candidates_where_nothing_fast_joins_the_cards(cards: Plan) -> None:
    ways = {(each.engine.name, each.tp, each.stages) for each in cards.candidates}
    assert ("vllm", 1, 3) in ways
    assert not {stages for engine, _, stages in ways if engine == "phalanx"} - {1}
    way = found(cards, stages=3)
    whole = fit(catalog.model("Llama-3.3-70B"), Machine.parse("1xH200"), 1, ENGINES["vllm"], weight_format="awq")
    assert 1 / 3 < way.fit.tightest.weight_bytes / whole.tightest.weight_bytes < 0.42
    assert way.gpus == 3
    switched = ask(PlanQuestion("Llama-3.3-70B", "4xH100-SXM", formats="fp8", engines="vllm"))
    assert {each.stages for each in switched.candidates} == {1}


def test_an_engine_in_one_box_is_told_its_stages(cards: Plan) -> None:
    launch = replace(launch_of(cards, found(cards, stages=3)), engine=ENGINES["vllm"])
    assert not launch.spans_machines
    assert launch.devices(0) == ["0", "1", "2"]
    script = recipe(launch, "shell")["serve.sh"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2 vllm" in script
    assert "--pipeline-parallel-size 3" in script
    deployment = next(yaml.safe_load_all(recipe(launch, "k8s")["kubernetes.yaml"]))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 3}
    for engine, flag in (("sglang", "--pp-size"), ("trtllm", "--pp_size")):
        words = command(replace(launch, engine=ENGINES[engine]))
        assert words[words.index(flag) + 1] == "3"


def test_ranks_of_their_own_hold_whole_layers_and_a_share_of_the_experts(latents: Plan) -> None:
    way, plain = (found(latents, engine=ENGINES["vllm"], attention_ranks=ranks) for ranks in (8, 1))
    spec = latents.spec
    experts = sum(
        spec.tensor_bytes(tensor, tensor.shape, "fp8") * count for tensor, count in spec.tensor_kinds if tensor.expert
    )
    assert isclose(way.fit.tightest.weight_bytes, spec.weight_bytes("fp8") - experts * 7 / 8, rel_tol=1e-6)
    assert 8 * way.fit.kv_tokens > 4 * plain.fit.kv_tokens, "latents are no longer held eight times"
    assert way.throughput > plain.throughput
    assert not [each for each in latents.candidates if each.attention_ranks > 1 and each.engine.name == "phalanx"]


def test_at_few_clients_ranks_of_their_own_are_slower() -> None:
    plan = ask(PlanQuestion("DeepSeek-V3", "8xH200-SXM", concurrency=8, engines="vllm", tps="8"))
    assert found(plan, attention_ranks=1).throughput > found(plan, attention_ranks=8).throughput


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("vllm", "--tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel"),
        ("sglang", "--tp-size 8 --ep-size 8 --dp-size 8 --enable-dp-attention"),
        ("trtllm", "--tp_size 8 --ep_size 8"),
    ],
)
def test_engines_are_told_of_ranks_of_their_own(latents: Plan, engine: str, told: str) -> None:
    launch = launch_of(latents, found(latents, engine=ENGINES[engine], attention_ranks=8))
    words = command(launch)
    assert told in " ".join(words)
    assert ("enable_attention_dp: true" in trtllm_options(launch)) is True
    if engine == "sglang":  # its limits are of all ranks together
        assert int(words[words.index("--max-running-requests") + 1]) == 8 * launch.max_num_seqs


def test_models_without_latents_or_experts_are_not_dealt_so() -> None:
    for model in ("Llama-3.3-70B", "Qwen3-30B-A3B"):
        plan = ask(PlanQuestion(model, "8xH100-SXM", engines="vllm", formats="fp8"))
        assert {each.attention_ranks for each in plan.candidates} == {1}


def test_ranks_of_their_own_hold_a_rate() -> None:
    plan = ask(PlanQuestion("DeepSeek-V3", "8xH200-SXM", rate=2.0, engines="vllm", tps="8"))
    way = found(plan, attention_ranks=8)
    assert way.is_held
    assert isclose(way.throughput, 2.0 * plan.workload.mean_output, rel_tol=1e-6)
