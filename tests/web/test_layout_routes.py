"""What the cockpit is told about a split: the same numbers as `Layout`, from the catalog only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.models import catalog
from phalanx.server.error_handlers import add_error_handlers
from phalanx.spec import Layout
from phalanx.spec.machine import Gpu
from phalanx.web.layout_routes import DEGREES, Served, describe, layout_routes

H100 = Gpu.named("H100-SXM")


def client(served: Served | None = None) -> TestClient:
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(layout_routes(served))
    return TestClient(app)


def ask(**query: Any) -> dict[str, Any]:
    answer = client().get("/cockpit/layout", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lengths(told: dict[str, Any], name: str) -> list[int]:
    return [stop - start for start, stop in told["dealt"][name]["shares"]]


def test_nine_heads_over_two_ranks_are_two_groups_and_one() -> None:
    told = ask(model="SmolLM2-135M", tp=2)
    assert lengths(told, "query_heads") == [6, 3]
    assert lengths(told, "kv_heads") == [2, 1]
    assert told["dealt"]["query_heads"]["uneven"]
    assert told["dealt"]["query_heads"]["unit"] == 3
    assert not told["dealt"]["ffn"]["uneven"]


def test_fp8_blocks_stay_whole_where_they_do_not_divide() -> None:
    told = ask(model="Qwen2.5-72B", tp=4, format="fp8")
    assert told["dealt"]["ffn"] | {"shares": None} == {
        "total": 29568,
        "unit": 128,
        "blocks": True,
        "shares": None,
        "uneven": True,
        "replicated": False,
    }
    assert [length // 128 for length in lengths(told, "ffn")] == [58, 58, 58, 57]


def test_more_ranks_than_kv_heads_share_them() -> None:
    told = ask(model="Qwen3-30B-A3B", tp=8)
    assert told["dealt"]["kv_heads"]["replicated"]
    assert told["ranks"][4]["kv_shared_with"] == [5]
    assert lengths(told, "query_heads") == [4] * 8


@pytest.mark.parametrize("name", catalog.entries())
@pytest.mark.parametrize("tp", [1, 3, 8])
def test_every_model_is_told_as_layout_deals_it(name: str, tp: int) -> None:
    spec = catalog.model(name)
    layout, told = Layout(spec, tp), describe(spec, tp, H100, 16, len(spec.layers) // 2)
    for kind, dealt in told["dealt"].items():
        assert dealt["shares"] == [[part.start, part.stop] for part in (getattr(s, kind) for s in layout.shards)]
        assert all(start % dealt["unit"] == 0 for start, _ in dealt["shares"]), kind
    assert [rank["weight_bytes"] for rank in told["ranks"]] == [
        layout.weight_bytes(rank, spec.number_format) for rank in range(tp)
    ]
    assert {"mixer_in", "mixer_out", "ffn_in", "ffn_out"} <= set(told["parts"])


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-72B", "DeepSeek-V3", "gpt-oss-120b", "Qwen3-Next-80B-A3B"])
def test_layers_embedding_and_norms_are_all_of_a_ranks_weights(name: str) -> None:
    """Nothing of a layer falls between the stages."""
    spec = catalog.model(name)
    rank, total = 1, 0
    for layer in range(len(spec.layers)):
        parts = describe(spec, 2, H100, 1, layer)["parts"].values()
        total += sum(tensor["bytes"][rank] for part in parts for tensor in part["tensors"])
    layout = Layout(spec, 2)
    outside = [t for t in spec.stacked_tensors if "layers." not in t.name or t.name.endswith("_layernorm.weight")]
    outside = [t for t in outside if "self_attn" not in t.name]
    total += sum(spec.tensor_bytes(t, layout.shape(t, rank), spec.number_format) for t in outside)
    assert total == layout.weight_bytes(rank, spec.number_format)


def test_an_all_reduce_moves_the_activations_of_every_token() -> None:
    told = ask(model="Llama-3.3-70B", tp=4, tokens=64, gpu="H100-SXM")["all_reduce"]
    assert told["bytes"] == 64 * 8192 * 2
    assert told["count"] == 160
    assert told["seconds"] == all_reduce_seconds(64 * 8192 * 2, 4, H100.link, "nccl")
    assert ask(model="Llama-3.3-70B", tp=16)["all_reduce"]["link"] == "pcie"
    assert ask(model="Llama-3.3-70B", tp=1)["all_reduce"]["seconds"] == 0


def test_reading_weights_bounds_few_tokens_and_multiplying_bounds_many() -> None:
    few, many = (ask(model="Llama-3.3-70B", tp=4, tokens=tokens)["parts"]["ffn_in"] for tokens in (1, 8192))
    assert few["seconds"] == sum(tensor["bytes"][0] for tensor in few["tensors"]) / H100.bandwidth
    assert many["seconds"] == pytest.approx(2 * 8192 * 2 * 8192 * 28672 / 4 / H100.peak("bf16"))


def test_a_step_reads_only_the_experts_it_touches() -> None:
    one, all_of_them = (ask(model="Mixtral-8x7B", tp=1, tokens=n)["parts"]["ffn_in"]["seconds"] for n in (1, 256))
    whole = sum(t["bytes"][0] for t in ask(model="Mixtral-8x7B", tp=1)["parts"]["ffn_in"]["tensors"]) / H100.bandwidth
    assert one == pytest.approx(whole * 2 / 8)
    assert all_of_them == pytest.approx(whole)


def test_what_cannot_be_dealt_says_why_and_which_degrees_can() -> None:
    told = ask(model="SmolLM2-135M", tp=12)
    assert told["refusal"] == "TP=12, but the model has 9 query heads to deal. Use TP <= 9."
    assert "ranks" not in told
    refused = [each["tp"] for each in told["degrees"] if each["refusal"]]
    assert refused == [tp for tp in DEGREES if tp > 9]


def test_the_served_model_is_what_is_shown_first() -> None:
    spec = catalog.model("Qwen3-0.6B")
    served = client(Served("house-model", spec, 2))
    choices = served.get("/cockpit/layout/choices").json()
    assert (choices["model"], choices["tp"], choices["models"][0]) == ("house-model", 2, "house-model")
    told = served.get("/cockpit/layout").json()
    assert (told["name"], told["served"], told["tp"]) == ("house-model", True, 2)
    assert told["model"]["parameters"] == spec.parameters
    other = served.get("/cockpit/layout", params={"model": "SmolLM2-135M"}).json()
    assert (other["served"], other["model"]["heads"]) == (False, 9)


def test_no_file_is_opened_and_nothing_fetched_by_a_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(catalog, "_download_config", lambda name: pytest.fail(f"{name} was fetched"))
    for name in (str(tmp_path), str(tmp_path / "config.json"), "/etc/passwd", "../x", "~", ".", "someone/secret"):
        answer = client().get("/cockpit/layout", params={"model": name})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_model"


@pytest.mark.parametrize(
    "query", [{"tp": 0}, {"tp": 5000}, {"tp": "x"}, {"tokens": 0}, {"format": "fp7"}, {"gpu": "H999"}, {"layer": -1}]
)
def test_nonsense_is_refused_in_the_apis_own_words(query: dict[str, Any]) -> None:
    answer = client().get("/cockpit/layout", params={"model": "SmolLM2-135M", **query})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_layer_beyond_the_last_is_the_last() -> None:
    assert ask(model="SmolLM2-135M", tp=2, layer=9999)["layer"] == 29


def test_telling_a_split_needs_no_torch() -> None:
    code = "import sys; import phalanx.web.layout_routes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rank_that_does_not_fit_is_told_with_what_it_lacks() -> None:
    """70B in bf16 over two cards of 80 GB: 65.7 GiB of weights each fit hardly, over one they do not."""
    one, four = ask(model="Llama-3.3-70B", tp=1), ask(model="Llama-3.3-70B", tp=4)
    assert one["ranks"][0]["room_bytes"] < 0 < four["ranks"][0]["room_bytes"]
    assert one["ranks"][0]["weight_bytes"] > one["card_bytes"]
    small = ask(model="Llama-3.3-70B", tp=1, format="awq")
    assert small["ranks"][0]["room_bytes"] > 0
    assert small["dealt"]["ffn"]["unit"] == 128


@pytest.mark.parametrize(("gpus", "replicas", "idle"), [(None, 1, 0), (8, 2, 0), (11, 2, 3), (2, 1, 0)])
def test_gpus_beyond_the_ranks_are_replicas(gpus: int | None, replicas: int, idle: int) -> None:
    told = ask(model="Llama-3.3-70B", tp=4, **({"gpus": gpus} if gpus else {}))
    assert (told["replicas"], told["idle"]) == (replicas, idle)
