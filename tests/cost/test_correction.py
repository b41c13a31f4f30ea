"""Corrections: effects add up, what is unknown is left alone, and ignorance widens the bounds."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import msgspec
import pytest

from phalanx.cost.correction import Traits, effects, traits_of
from phalanx.cost.fitted import Quantity, Width, load_fitted
from phalanx.cost.price import Rates
from phalanx.cost.profiles import PROFILES, profile
from phalanx.models import catalog
from phalanx.spec.workload import Workload

MIDDLE = Workload(2048, 512, 32)


def traits(name: str = "Llama-3.3-70B", tp: int = 4, load: Workload = MIDDLE) -> Traits:
    return traits_of(catalog.model(name), "vllm-0.10", "0.10.2", "H100-SXM", tp, 1, load)


def quantity(**named: float) -> Quantity:
    names = {key.replace("__", ":"): value for key, value in named.items()}
    return Quantity(names, Width(0.2, {"vllm-0.10": 0.1}))


def test_nothing_known_corrects_nothing() -> None:
    assert quantity().correction(traits()) == 1.0


def test_effects_add_up_in_logarithms() -> None:
    known = {"family:vllm-0.10": 0.1, "model:vllm-0.10/llama-80x8192-0": 0.2, "family:sglang-0.5": 5.0}
    assert Quantity(known, Width(0, {})).correction(traits()) == pytest.approx(exp(0.3))


def test_slopes_start_in_the_middle_of_what_was_measured_and_stop_at_its_ends() -> None:
    def slope(load: Workload, name: str = "slope") -> dict[str, float]:
        return {what: strength for kind, what, strength in effects(traits(load=load)) if kind == name}

    middle = slope(MIDDLE)
    assert middle["vllm-0.10/concurrency"] == middle["vllm-0.10/input"] == middle["vllm-0.10/output"] == 0
    crowded, crushed = (slope(replace(MIDDLE, concurrency=clients)) for clients in (512, 100_000))
    assert crowded == crushed
    assert crowded["vllm-0.10/concurrency"] == 2
    assert crowded["vllm-0.10/concurrency*concurrency"] == 4


def test_closed_loops_say_nothing_of_whole_runs() -> None:
    """Slopes that closed loops taught are not drawn on to batches and lengths that they never had."""
    whole = [kind for kind, _, _ in effects(traits(load=replace(MIDDLE, concurrency=3000, requests=3000)))]
    assert "regime" in whole
    assert not {"slope", "model_slope", "family", "model"} & set(whole)
    assert "regime" not in [kind for kind, _, _ in effects(traits())]


def test_models_of_the_same_shape_share_their_effects() -> None:
    assert traits("DeepSeek-R1").model == traits("DeepSeek-V3").model
    assert traits("Llama-3.1-8B").model != traits("Llama-3.3-70B").model
    assert [traits(name).kind for name in ("Llama-3.1-8B", "gpt-oss-120b", "DeepSeek-R1")] == ["dense", "moe", "latent"]


def test_the_unseen_is_less_certain() -> None:
    width = Width(0.2, {"vllm-0.10": 0.1}, {"publisher": 0.3, "gpu": 0.4})
    known = width.half("vllm-0.10", [])
    assert known == pytest.approx(0.1)
    assert known < width.half("vllm-0.10", ["publisher"]) < width.half("vllm-0.10", ["publisher", "gpu"])
    assert width.half("new", []) == 0.2
    assert width.half("vllm-0.10", ["gpu"]) == pytest.approx((0.1**2 + 0.4**2 - 0.2**2) ** 0.5)


def test_what_is_new_is_named() -> None:
    fitted = load_fitted()
    known = replace(traits(), publisher="InferenceX")
    assert fitted.new_of(known) == []
    assert fitted.new_of(traits()) == ["publisher"]
    assert fitted.new_of(replace(known, gpu="Gaudi3", model="unheard-of")) == ["gpu", "model", "pair"]


def test_fitted_numbers_are_dated_and_physical() -> None:
    fitted = load_fitted()
    assert fitted.source
    assert fitted.date.startswith("20")
    assert fitted.rows > 500
    shares = ("linear_bandwidth", "linear_compute", "expert_compute", "cache_bandwidth", "prompt_attention")
    for each in PROFILES:
        rates = fitted.family_rates(each.family)._asdict()
        assert rates.keys() == set(Rates._fields)
        assert all(value > 0 for value in rates.values())
        assert all(0.05 < rates[name] <= 1 for name in shares), each.family


def test_a_profile_of_an_earlier_version_is_read() -> None:
    """It has a rate that is no more, and lacks one that came since."""
    shipped = load_fitted()
    rates = {name: value for name, value in shipped.rates["phalanx"].items() if name != "woven_layer_us"}
    earlier = msgspec.structs.replace(shipped, rates={"phalanx": {**rates, "prompt_sparse_us": 50.0}})
    known = shipped.family_rates("phalanx")
    assert earlier.family_rates("phalanx", "Hopper") == known._replace(woven_layer_us=0.0)


@pytest.mark.parametrize(
    ("engine", "version", "family"),
    [
        ("vllm", "0.10.2", "vllm-0.10"),
        ("vllm", "0.12.0", "vllm-0.10"),
        ("vllm", "0.7.3", "vllm-0.7"),
        ("vllm", "0.5.5", "vllm-0.5"),
        ("vllm", "0", "vllm-0.5"),
        ("vllm", "0.18.0", "vllm-0.18"),
        ("vllm", "", "vllm-0.18"),
        ("sglang", "0.5.8.post1", "sglang-0.5"),
        ("sglang", "0.5.9", "sglang-0.5.9"),
        ("sglang", "0.5.10", "sglang-0.5.9"),
        ("trtllm", "1.0.0rc3", "trtllm-1.0"),
        ("trtllm", "0.14", "trtllm-0.14"),
        ("trtllm", "1.1.0rc2.post2", "trtllm-1.1"),
        ("trtllm", "gpt-oss-dev", "trtllm-1.1"),
        ("phalanx", "", "phalanx"),
    ],
)
def test_versions_belong_to_families(engine: str, version: str, family: str) -> None:
    assert profile(engine, version).family == family
