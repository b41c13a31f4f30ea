"""What single kernels reach: every card and format has a share, and the nearest card's where it has none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cost.kernels import CardReach, at_reach, kernels_like, reach_of
from phalanx.cost.price import Rates
from phalanx.cost.work import count_work
from phalanx.models import catalog
from phalanx.spec.formats import FORMATS
from phalanx.spec.machine import Gpu, gpus

ONES = Rates(*[1.0] * len(Rates._fields))


@pytest.mark.parametrize(
    ("card", "measured"),
    [
        ("H100-SXM", "H100-SXM"),
        ("H100-PCIe", "H100-SXM"),
        ("GB300", "B200"),
        ("RTX5090", "RTX-PRO-6000"),
        ("DGX-Spark", "RTX-PRO-6000"),
        ("RTX3090", "A100-SXM-80GB"),
        ("RTX4090", "L40S"),
        ("MI355X", "MI300X"),
    ],
)
def test_a_card_goes_by_the_nearest_of_its_architecture(card: str, measured: str) -> None:
    assert kernels_like(Gpu.named(card)).card == measured


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B", "gpt-oss-20b"])
def test_every_card_reaches_something_possible_in_every_format(model: str) -> None:
    spec = catalog.model(model)
    for gpu in gpus():
        for number_format in FORMATS:
            reach = reach_of(gpu, count_work(spec.in_format(number_format), 1, number_format, "bf16"))
            assert all(0.25 < share < 2 for share in reach), (gpu.name, number_format, reach)


def test_experts_in_four_bits_go_by_their_own_kernels() -> None:
    spec = catalog.model("gpt-oss-20b")
    work = count_work(spec, 1, "mxfp4", "bf16")
    here = reach_of(Gpu.named("H200-SXM"), work)
    assert here == CardReach(*[1.0] * 9)._replace(expert_compute=here.expert_compute)
    there = reach_of(Gpu.named("B200"), work)
    assert there.linear_bandwidth == pytest.approx((0.80 / 0.85) ** 0.7)
    assert there.expert_bandwidth == pytest.approx((0.92 / 0.58) ** 0.7)


@pytest.mark.parametrize(
    ("number_format", "share"), [("bf16", 0.69), ("fp8", 0.36), ("fp8-channel", 0.69), ("mxfp4", 0.58)]
)
def test_experts_multiply_by_the_share_of_their_format(number_format: str, share: float) -> None:
    """Of the peak on an H200, beside bf16's: with scales by block half as much, with one a row as much."""
    work = count_work(catalog.model("Qwen3-30B-A3B").in_format(number_format), 1, number_format, "bf16")
    assert reach_of(Gpu.named("H200-SXM"), work).expert_compute == pytest.approx((share / 0.69) ** 0.7)


def test_rates_go_over_by_what_kernels_reach() -> None:
    reach = CardReach(0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 2.0, 1.5, 1.25)
    found = at_reach(ONES, reach)
    assert found.linear_bandwidth == 0.8
    assert found.sparse_layer_us == 2.0
    assert found.routed_passes == 1.5
    assert found.layer_us == 1.25
    assert found.all_reduce == found.woven_layer_us == 1.0


def test_the_file_says_what_the_tables_say() -> None:
    data = Path(__file__).parents[3] / "shared" / "data"
    if not (data / "kernels").exists():
        pytest.skip("needs ../shared/data/kernels")
    from benchmarks import kernel_shares

    gpu = Gpu.named("A100-SXM-80GB")
    rows = list(kernel_shares.read(data, "a100_sxm", "moe"))
    samples = list(kernel_shares.expert_reads(rows, "bf16", gpu))
    taken = kernel_shares.np.array(samples)
    _, slopes, _ = kernel_shares.fit(taken[:, :-1], taken[:, -1])
    assert 1 / slopes[0] == pytest.approx(kernels_like(gpu).expert_read["bf16"], abs=0.01)


@pytest.mark.parametrize(("prefix", "card"), [("a100_sxm", "A100-SXM-80GB"), ("b200_sxm", "B200")])
def test_a_layer_begins_as_late_as_the_tables_say(prefix: str, card: str) -> None:
    """Four products and an attention, each before it reads."""
    data = Path(__file__).parents[3] / "shared" / "data"
    if not (data / "kernels").exists():
        pytest.skip("needs ../shared/data/kernels")
    from benchmarks import kernel_shares

    gpu = Gpu.named(card)
    gemms = [row for row in kernel_shares.read(data, prefix, "gemm") if row["gemm_dtype"] == "bfloat16"]
    products = kernel_shares.np.array(list(kernel_shares.linear(gemms, "bf16", gpu, (1, 128), 2**22)))
    attentions = kernel_shares.np.array(
        list(kernel_shares.cache_reads(kernel_shares.read(data, prefix, "generation_attention"), gpu))
    )
    product, attention = (kernel_shares.fit(taken[:, :-1], taken[:, -1])[0] for taken in (products, attentions))
    assert 1e6 * (4 * product + attention) == pytest.approx(kernels_like(gpu).layer_us, abs=0.6)
