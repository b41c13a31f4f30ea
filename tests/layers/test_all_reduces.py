"""Two all-reduces a layer and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.fabric.group import Solo
from phalanx.kernels.fp8 import Form, InBoth, Quantised, dequantise
from phalanx.kernels.quantise import quantise
from phalanx.models import read_config
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import Reference


class CountingGroup(Solo):
    """A group of one that counts what it is asked to exchange."""

    def __init__(self) -> None:
        self.reduced: list[tuple[int, ...]] = []
        self.gathered = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced.append(tuple(tensor.shape))
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: object) -> Tensor:
        self.gathered += 1
        return tensor


def test_a_step_exchanges_twice_a_layer_and_gathers_the_logits_once(
    captured: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of several ranks does: one alone computes a layer in one call, which exchanges nothing."""
    monkeypatch.setattr("phalanx.layers.layer.whole_layer", lambda *parts: None)
    group, config = CountingGroup(), EngineConfig(max_num_seqs=2)
    model = load_model(config, Checkpoint(captured.folder), group, progress=lambda done, total: None)
    runner = make_runner(config, model, Sizes(num_blocks=8, max_model_len=64))
    prompt = captured.prompts[2]
    admission = Admission(0, len(prompt), prompt, 0, SamplingParams(temperature=0))
    spec = model.place.spec
    of_windows = [(0, window, [2 * window + 2, 2 * window + 3]) for window in range(len(spec.window_groups))]
    runner.launch(StepPlan(1, [admission], [0], [0], [len(prompt)], [1], [(0, [0, 1])], window_blocks=of_windows))
    behind_the_last_attention = [(1, spec.hidden)] * 2
    assert group.reduced == [(len(prompt), spec.hidden)] * (2 * len(spec.layers) - 2) + behind_the_last_attention
    assert group.gathered == 1
    runner.launch(StepPlan(2, [], [0], [len(prompt)], [1], [1], []))
    assert len(group.reduced) == 4 * len(spec.layers)
    assert runner.collect().tokens == captured.continuations[2][:1]
    assert runner.collect().tokens == captured.continuations[2][1:2]


def test_the_bias_after_a_row_parallel_product_counts_once() -> None:
    """Two ranks' partial products with a bias: the sum has it once, not twice."""
    from phalanx.layers.linear import RowParallelLinear
    from phalanx.layers.place import Place
    from phalanx.spec import Layout

    spec = read_config(
        {
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 8,
            "mlp_bias": True,
        }
    )
    weight, bias, x = torch.randn(8, 32), torch.randn(8), torch.randn(3, 32)

    class Half(Solo):
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank  # type: ignore[misc]

    layout, parts = Layout(spec, 2), []
    for rank in range(2):
        place = Place(layout, Half(rank), torch.float32, torch.device("cpu"))
        layer = RowParallelLinear(place, "model.layers.0.mlp.down_proj")
        owned = layout.owned("ffn", rank)
        layer.product.weight.copy_(weight[:, owned.start : owned.stop])
        assert layer.bias is not None
        layer.bias.copy_(bias)
        parts.append(layer(x[:, owned.start : owned.stop]))
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.T + bias)


@pytest.mark.parametrize("form", Form)
def test_the_norm_behind_a_layer_adds_up_all_ranks_parts_first(form: Form) -> None:
    """By the definition: the sum over ranks, added to the residual, which keeps it, and the norm of that."""
    part, other, residual, weight = (torch.randn(shape) for shape in ((3, 256), (3, 256), (3, 256), (256,)))

    class Pair(Solo):
        size = 2

        def all_reduce(self, tensor: Tensor) -> Tensor:
            return tensor + other

    whole = residual + (part + other)
    kept = residual.clone()
    found = Pair().all_reduce_add_norm(part, kept, weight, 1e-5, form)
    assert torch.equal(kept, whole)
    wanted = torch.nn.functional.rms_norm(whole, (256,), weight, 1e-5)
    if form is Form.BOTH:
        assert isinstance(found, InBoth)
        for given, brought in zip(found.in_fp8, quantise(found.plain), strict=True):
            assert torch.equal(given, brought)
        found = found.plain
    if form is Form.FP8:
        assert isinstance(found, Quantised)
        found = dequantise(found.values, found.scales, 1, torch.float32)
    assert isinstance(found, Tensor)
    rough = form is Form.FP8
    torch.testing.assert_close(found, wanted, rtol=0.07 if rough else 1e-5, atol=0.02 if rough else 1e-5)
