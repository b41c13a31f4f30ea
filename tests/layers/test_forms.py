"""In which form a part of a layer takes its input, and gives what comes of it: the bits are those of the plain one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.kernels import attention
from phalanx.kernels.attention import AttentionBatch, Sight, SightMasks, paged_attention
from phalanx.kernels.cache import CacheScales, Fresh
from phalanx.kernels.fp8 import Form, Fp8Weight, quantise_blocks
from phalanx.kernels.gemm import Fp8Gemm
from phalanx.kernels.pairs import Unsummed
from phalanx.kernels.rotary import rotate_and_store
from phalanx.kernels.router import RouterAtOnce, blanks_for
from phalanx.kernels.unnormed import Unnormed
from phalanx.layers.adapters import Added, StepAdapters
from phalanx.layers.decoder import Decoder
from phalanx.layers.ffn import experts
from phalanx.layers.mixers.delta import DeltaMixer
from phalanx.layers.place import Place
from phalanx.layers.step import StepContext
from phalanx.models import read_config
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, make_runner
from phalanx.runtime.runner import TorchRunner
from phalanx.spec import Layout
from tests.conftest import tiny_config

IN_FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
PROMPT = list(range(5, 24))


def runner_of(name: str, in_fp8: bool = True) -> TorchRunner:
    """A tiny model in bfloat16, with weights in FP8 where checkpoints of its family have them so."""
    place = Place(
        Layout(read_config(tiny_config(name).to_dict() | (IN_FP8 if in_fp8 else {})), 1),
        Solo(),
        torch.bfloat16,
        torch.device("cpu"),
        quantised=True,
    )
    model = Decoder(place)
    for part_name, part in model.parts():
        if isinstance(part, Fp8Weight):
            part.fill(*quantise_blocks(torch.randn(part.shape) * 0.1))
        elif isinstance(part, Tensor) and part.is_floating_point():
            part.copy_(torch.randn(part.shape) * 0.1 + ("norm" in part_name))
        else:
            assert isinstance(part, Tensor)
            part.copy_(torch.arange(part.numel()).view(part.shape) % place.spec.layers[0].ffn.experts)
    return make_runner(EngineConfig(max_num_seqs=2, dtype="bf16"), model, Sizes(num_blocks=40, max_model_len=64))


def hidden(runner: TorchRunner, adapters: StepAdapters | None = None) -> Tensor:
    """Behind the last layer, of all tokens of a prompt."""
    admission = Admission(0, len(PROMPT), PROMPT, 0, SamplingParams(temperature=0))
    windows = [(0, group, [20 + 3 * group + at for at in range(3)]) for group in range(5)]
    windows = windows[: len(runner.model.place.spec.window_groups)]
    plan = StepPlan(1, [admission], [0], [0], [len(PROMPT)], [1], [(0, [0, 1, 2])], window_blocks=windows)
    inputs = runner.batch.prepare(plan)
    return runner.model(inputs.tokens, inputs.positions, inputs.attention, None, adapters)


@pytest.mark.parametrize(
    ("name", "mixers", "ffns"),
    [
        ("qwen3_next", {Form.BOTH, Form.FP8}, {Form.BOTH, Form.FP8}),
        ("qwen3_5_text", {Form.BOTH, Form.FP8}, {Form.FP8}),
        ("qwen3_5_moe_text", {Form.BOTH, Form.FP8}, {Form.BOTH}),
        ("deepseek_v32", {Form.BOTH}, {Form.BOTH, Form.FP8}),
        ("deepseek_v4", {Form.BOTH, Form.FP8}, {Form.BOTH}),
        ("qwen3_moe", {Form.FP8}, {Form.PLAIN, Form.FP8}),
    ],
)
def test_what_a_norm_brings_to_fp8_is_what_products_would(
    name: str, mixers: set[Form], ffns: set[Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta nets, gated attention, indexers and shared experts, which take one input in two forms, or all in FP8."""
    runner = runner_of(name)
    assert {layer.mixer.takes for layer in runner.model.layers} == mixers
    assert {layer.ffn.takes for layer in runner.model.layers} == ffns
    found = hidden(runner)
    assert found.isfinite().all()
    monkeypatch.setattr(StepContext, "form", lambda *_: Form.PLAIN)
    assert torch.equal(found, hidden(runner))


def test_a_net_may_take_all_it_takes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("qwen3_5_text")
    nets = [layer.mixer for layer in runner.model.layers if isinstance(layer.mixer, DeltaMixer)]
    for net in nets:
        plain = net.rates.product.weight
        weight = Fp8Weight.empty(*plain.shape, row_block=128, device=plain.device)
        weight.fill(*quantise_blocks(plain.float()))
        net.rates.product = Fp8Gemm(weight, None, plain.dtype)
    assert {net.takes for net in nets} == {Form.FP8}
    found = hidden(runner)
    assert found.isfinite().all()
    monkeypatch.setattr(StepContext, "form", lambda *_: Form.PLAIN)
    assert torch.equal(found, hidden(runner))


def test_adapters_multiply_what_comes_in_as_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("qwen3_5_text")
    for linear in runner.model.linears():
        inputs, outputs = linear.product.weight.shape[1], sum(linear.rows)
        linear.adapters[1] = Added(torch.randn(4, inputs).bfloat16(), torch.randn(outputs, 4).bfloat16() / 9)
    adapters = StepAdapters([1], torch.ones(len(PROMPT), dtype=torch.int64))
    asked: list[Form] = []
    form = StepContext.form
    monkeypatch.setattr(StepContext, "form", lambda step, takes: asked.append(form(step, takes)) or asked[-1])
    found = hidden(runner, adapters)
    assert set(asked) == {Form.BOTH}
    monkeypatch.setattr(StepContext, "form", lambda *_: Form.PLAIN)
    assert torch.equal(found, hidden(runner, adapters))
    assert not torch.equal(found, hidden(runner))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text", "deepseek_v4"])
def test_experts_may_leave_it_to_the_next_norm_to_sum_them_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last layer, and where there are several streams, they are summed up before."""
    runner, made = runner_of(name), experts.expert_pairs
    wanted, pairs = hidden(runner), 0

    def apart(*asked: Any) -> Unsummed:
        nonlocal pairs
        pairs += 1
        whole = made(*asked)
        assert isinstance(whole, Tensor)
        return Unsummed(torch.stack((whole / 2, whole / 2), 1).flatten(0, 1), 2)

    monkeypatch.setattr(experts, "expert_pairs", apart)
    assert torch.equal(hidden(runner), wanted)
    assert pairs > 1


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text", "deepseek_v32", "deepseek_v4", "gpt_oss"])
def test_experts_may_be_chosen_in_the_launch_that_scores_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the definition of that kernel, which may norm too: with a shared gate, a correction, a table and a bias."""
    torch.manual_seed(0)
    wanted, calls, unnormed, most = hidden(runner_of(name)), 0, 0, 0

    class Counted(RouterAtOnce):
        def takes(self, rows: int) -> bool:
            return rows <= most

        def __call__(self, *given: Any) -> Any:
            nonlocal calls, unnormed
            calls += 1
            unnormed += isinstance(given[0], Unnormed)
            return super().__call__(*given)

    monkeypatch.setattr(RouterAtOnce, "of", lambda *given: Counted(*given, blanks_for(1, torch.device("cpu"))))
    torch.manual_seed(0)
    runner = runner_of(name)
    routed = sum(isinstance(layer.ffn, experts.Experts) for layer in runner.model.layers)
    assert torch.equal(hidden(runner), wanted)
    assert calls == 0
    most = len(PROMPT)
    assert torch.equal(hidden(runner), wanted)
    assert calls == routed > 0
    assert unnormed == (0 if name == "deepseek_v4" else routed), "several streams are normed before"


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("name", "fresh"), [("llama", True), ("gpt_oss", True), ("qwen3", False)])
def test_a_single_row_may_be_turned_where_it_is_attended(
    name: str, fresh: bool, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the definition of that kernel: with sinks and windows, but not where heads are normed, nor several rows."""
    torch.manual_seed(0)
    runner, calls, scales = runner_of(name, in_fp8), 0, CacheScales()
    hidden(runner)
    mixers = [layer.mixer for layer in runner.model.layers]
    begun = [mixer.cache.clone() for mixer in mixers]

    def goes_on(*at: int) -> list[Tensor]:
        """Behind the last layer, and what is cached then."""
        for mixer, cache in zip(mixers, begun, strict=True):
            mixer.cache.copy_(cache)
            mixer.cache_scales = scales
        positions = torch.tensor(at)
        tokens, attention = runner.batch.decode_inputs(torch.zeros_like(positions), positions, False, apart=False)
        return [runner.model(tokens, positions, attention), *(mixer.cache.clone() for mixer in mixers)]

    def turned_and_attended(
        qkv: Tensor, heads: int, cache: Tensor, batch: AttentionBatch, sight: Sight, scale: float, out: Tensor,
        value_scale: float, fresh: Fresh,
    ) -> None:  # fmt: skip
        nonlocal calls
        calls += 1
        assert fresh.scales is scales
        turned, masks = qkv.clone(), SightMasks(batch, cache.shape[1], qkv.dtype)
        rotate_and_store(turned, fresh.cos, fresh.sin, fresh.write_to, cache, heads, cache.shape[3])
        out.copy_(paged_attention(turned, heads, cache, batch, masks, sight, scale, value_scale))

    def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
        return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    following = len(PROMPT)
    one, two = goes_on(following), goes_on(following, following + 1)
    monkeypatch.setattr(attention, "_reads_early", lambda cache, dtype: True)
    monkeypatch.setattr(attention, "_attend_fresh", turned_and_attended)
    assert same(goes_on(following), one)
    assert calls == (len(mixers) if fresh else 0)
    calls = 0
    assert same(goes_on(following, following + 1), two)
    assert calls == 0


@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3_5_text", 4), ("qwen3_5_text", 9), ("deepseek_v3", 5), ("qwen3", 1), ("qwen3", 2)]
)
def test_a_sketch_has_one_of_each_kind_behind_every_kind_that_it_follows(name: str, layers: int) -> None:
    """So that every form in which a norm is given something, and gives it, is rehearsed."""
    told = tiny_config(name, num_hidden_layers=layers, layer_types=None).to_dict()
    model = Decoder(Place(Layout(read_config(told), 1), Solo(), torch.float32, torch.device("cpu")))
    some, every = model.sketch().layers, model.layers
    steps = [{(before.kind, layer.kind) for before, layer in pairwise(each)} for each in (some, every)]
    assert steps[0] >= steps[1]
    assert (some[0], some[-1]) == (every[0], every[-1])
    assert every[-1] not in some[:-1]
    assert len(some) <= 2 * len(steps[1]) + 1
