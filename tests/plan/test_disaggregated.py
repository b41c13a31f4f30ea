"""Prompts and answers apart: how fast a loop turns, when it wins, and what engines are told."""

from __future__ import annotations

import heapq
import json
import random
import subprocess
from itertools import count

import pytest
import yaml

from phalanx.engine.step_sums import StepSums
from phalanx.errors import ConfigError
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.disaggregated import Apart
from phalanx.plan.explain import explain
from phalanx.plan.recipes import recipe
from phalanx.plan.record import launch_of
from phalanx.spec.workload import Workload

OUTPUT = 50


def price(step: StepSums) -> float:
    return 0.010 + 0.0002 * step.decodes + 0.0002 * step.prompt_tokens


def simulated(clients: int, prompts: int, answers: int, transfer: float, until: int = 1500) -> tuple[float, float]:
    """Requests a second and mean seconds to the first token, event by event: prompts one after the other on the server
    that is free first; an answer takes a step of as many as its server then has, again and again.
    """
    clock, started, done, waits, number, chance = 0.0, 0.0, 0, [], count(), random.Random(1)
    free = [0.0] * prompts
    batches = [0] * answers
    events: list[tuple[float, int, str, int, int, float]] = []

    def ask_again(now: float) -> None:
        server = min(range(prompts), key=free.__getitem__)
        free[server] = max(now, free[server]) + price(StepSums(0, 0, chance.randint(320, 400), 0.0, 1))
        heapq.heappush(
            events,
            (free[server] + transfer, next(number), "begin", 0, chance.randint(round(0.8 * OUTPUT), OUTPUT) - 1, now),
        )

    for _ in range(clients):
        ask_again(0.0)
    while done < until:
        clock, _, what, server, left, asked = heapq.heappop(events)
        if what == "begin":
            if done > until / 3:
                waits.append(clock - asked)
            server = min(range(answers), key=batches.__getitem__)
            batches[server] += 1
        elif left == 0:
            batches[server] -= 1
            done += 1
            started = clock if done == until // 3 else started
            ask_again(clock)
            continue
        step = price(StepSums(batches[server], 0.0))
        heapq.heappush(events, (clock + step, next(number), "step", server, left - 1, asked))
    return (until - until // 3) / (clock - started), sum(waits) / len(waits)


@pytest.mark.parametrize(("clients", "prompts", "answers"), [(4, 1, 1), (24, 2, 2), (64, 3, 1), (64, 1, 3)])
def test_a_loop_turns_as_fast_as_its_events(clients: int, prompts: int, answers: int) -> None:
    way = Apart(Workload(400, OUTPUT, clients, 0.2), price, prompts, answers, 0.02, 1000.0, 400)
    lap = way.lap()
    rate, first = simulated(clients, prompts, answers, 0.02)
    assert lap.rate == pytest.approx(rate, rel=0.1)
    assert lap.waited + lap.prompt + lap.sent == pytest.approx(first, rel=0.35)


def test_a_full_cache_bounds_the_batch() -> None:
    way = Apart(Workload(400, OUTPUT, 64), price, 2, 2, 0.02, 5.0, 400)
    assert way.lap().batch == 5.0
    assert way.present(5.0) < 64


@pytest.fixture(scope="module")
def large() -> Plan:
    return ask(
        PlanQuestion(
            "Llama-3.3-70B", "2x8xH100-SXM", concurrency=256, input_tokens=4096, output_tokens=512, slo="tpot:25",
            engines="vllm,sglang,trtllm", formats="fp8", tps="2,4",
        )
    )  # fmt: skip


def apart(plan: Plan, engine: str) -> Candidate:
    return next(each for each in plan.candidates if each.prompt_replicas and each.engine.name == engine)


def test_it_wins_where_answers_must_not_wait_for_prompts(large: Plan) -> None:
    assert large.best is not None
    assert large.best.prompt_replicas
    assert large.meets(large.best)
    assert "for prompts alone keep answers free of them: that wins here" in explain(large)
    best, rival = large.best, next(each for each in large.candidates if not each.prompt_replicas)
    assert best.prediction.tpot.mid < rival.prediction.tpot.mid
    assert best.gpus <= 16
    assert f"{best.prompt_replicas}P+{best.replicas - best.prompt_replicas}D" in best.label


def test_it_is_no_way_of_one_box_of_phalanx_or_of_a_rate() -> None:
    for told in ({"machine": "8xH100-SXM"}, {"machine": "2x8xH100-SXM", "rate": 2.0}):
        plan = ask(PlanQuestion("Llama-3.3-70B", tps="4", formats="fp8", engines="vllm,phalanx", **told))  # type: ignore[arg-type]
        assert not [each for each in plan.candidates if each.prompt_replicas]


def test_a_slow_network_makes_it_wait() -> None:
    fast, slow = (
        ask(PlanQuestion("Llama-3.3-70B", "2x8xH100-SXM", network=network, engines="vllm", formats="fp8", tps="8"))
        for network in ("ib-ndr", "10gbe")
    )
    assert apart(slow, "vllm").prediction.ttft.mid > 1.3 * apart(fast, "vllm").prediction.ttft.mid


def test_every_replica_has_a_script_and_the_router_knows_them_all(large: Plan) -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        way = apart(large, engine)
        files = recipe(launch_of(large, way), "shell")
        servers = [name for name in files if name.endswith(".sh") and name != "router.sh"]
        assert len(servers) == way.replicas
        assert sum(name.startswith("prefill") for name in servers) == way.prompt_replicas
        for name in files:
            if name.endswith(".sh"):
                assert subprocess.run(["bash", "-n"], input=files[name], text=True, check=False).returncode == 0
        ports = {
            line.split("--port ")[1].split()[0]
            for name in servers
            for line in files[name].splitlines()
            if "--port" in line
        }
        assert len(ports) == way.replicas
        router = files["router.sh"] + files.get("router.yaml", "")
        assert all(f"127.0.0.1:{port}" in router for port in ports)
        if engine == "vllm":
            words = files["prefill-0.sh"].split("--kv-transfer-config ")[1].split("'")[1]
            assert json.loads(words)["kv_connector"] == "NixlConnector"
        elif engine == "sglang":
            assert "--disaggregation-mode decode" in files["decode-0.sh"]
            assert "--disaggregation-bootstrap-port 9100" in files["prefill-0.sh"]
        else:
            told = yaml.safe_load(files["prefill.yaml"])
            assert told["disable_overlap_scheduler"]
            assert told["cache_transceiver_config"]["backend"] == "DEFAULT"
            assert yaml.safe_load(files["router.yaml"])["context_servers"]["num_instances"] == way.prompt_replicas
            assert "--extra_llm_api_options decode.yaml" in files["decode-0.sh"]


def test_other_recipes_are_refused(large: Plan) -> None:
    assert large.best is not None
    with pytest.raises(ConfigError, match="there is no k8s recipe") as refused:
        recipe(launch_of(large, large.best), "k8s")
    assert "--recipe shell" in refused.value.fix
