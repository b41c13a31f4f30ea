"""Names as people write them."""

from __future__ import annotations

import pytest

from phalanx.errors import ModelError
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.record import launch_of


@pytest.mark.parametrize(
    ("name", "real"),
    [
        ("Qwen3-72B", ("Qwen3-32B", "Qwen2.5-72B")),
        ("Qwen/Qwen3-72B-Instruct", ("Qwen3-32B", "Qwen2.5-72B")),
        ("Qwen3.5-235B-A17B", ("Qwen3-235B-A22B", "Qwen3.5-397B-A17B")),
        ("DeepSeek-V4", ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")),
    ],
)
def test_what_is_written_about_but_does_not_exist_gets_what_does(name: str, real: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as refused:
        catalog.known(name)
    for each in real:
        assert each in refused.value.fix
        assert catalog.find(each) is not None


def test_every_name_of_hearsay_is_in_no_catalog() -> None:
    for name in catalog._HEARSAY:
        assert catalog.find(name) is None


@pytest.mark.parametrize(
    ("name", "number_format", "engine"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8-channel", "vllm"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "awq", "vllm"),
        ("Qwen/Qwen3-32B-FP8", "fp8", "phalanx"),
        ("meta-llama/Llama-3.1-70B-Instruct", "bf16", "vllm"),
    ],
)
def test_a_quantised_id_is_the_model_and_the_format_and_is_launched(name: str, number_format: str, engine: str) -> None:
    plan = ask(PlanQuestion(name, "4xH100-SXM", engines=engine, formats=number_format))
    assert plan.best is not None
    assert catalog.model(name).number_format == number_format
    assert launch_of(plan, plan.best).model == name


def test_the_newest_deepseek_is_known() -> None:
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"):
        assert catalog.find(name) is not None
