"""Bits that flip, in the residual stream, in a message, in a weight, and numbers that are none: found, and named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from phalanx import LLM, SamplingParams
from phalanx.engine.agreement import disagreement
from phalanx.errors import EngineDeadError, RequestError
from phalanx.fabric.group import Solo
from phalanx.kernels.digest import digests_into, plain_digests, row_digest, row_digest_torch
from phalanx.kernels.digest import words as words_of
from phalanx.kernels.fp8 import Form
from phalanx.layers.decoder import Decoder
from phalanx.layers.watch import Canary
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import load_model
from phalanx.runtime.weight_watch import Stretch, WatchTurn, WeightWatch
from phalanx.weights.checkpoint import Checkpoint
from tests import faults
from tests.conftest import Reference
from tests.runtime.test_stored_on_cpu import MODELS, gguf_of, needs_compiler

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3, 5, 8], [*range(20, 60)]]


def answers(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the fault committed by a rank in another process, or, if it is of rank 0, in this one."""

    def commit(fault: str) -> None:
        monkeypatch.setenv(faults.FAULT, fault)
        if fault.split()[1].startswith("0@"):
            for owner, name in (
                (faults.DecoderLayer, "__call__"),
                (faults.HostGroup, "all_reduce"),
                (WeightWatch, "__init__"),
            ):
                monkeypatch.setattr(owner, name, getattr(owner, name))
            faults.commit_fault(fault)

    return commit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 144), (2, 4, 36), (5, 7), (33, 38)])
def test_one_flipped_bit_changes_a_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows, out, defined = torch.randn(shape).to(dtype), torch.zeros((), dtype=torch.int64), torch.zeros(1).long()[0]
    row_digest(rows, out)
    row_digest_torch(rows, defined)
    before, sum_before = int(out), int(plain_digests(words_of(rows).flatten()))
    several = torch.zeros(4, dtype=torch.int64)
    put = digests_into(several)
    put(2, rows)
    assert before == int(defined) == int(several[2]) == int(several.sum())
    for bit in random.sample(range(8 * rows.nbytes), 40):
        faults.flip_bit(rows, bit)
        row_digest(rows, out)
        put(1, rows)
        assert int(out) == int(several[1]) != before
        assert int(plain_digests(words_of(rows).flatten())) != sum_before
        faults.flip_bit(rows, bit)
    row_digest(rows.flip(-1), out)
    assert int(out) != before


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({0: [7, 8, 9], 1: [7, 8, 9]}, None),
        ({0: [7, 8, 8, 9], 1: [7, 8, 1, 2]}, "Ranks 0 and 1 differ in the residual stream behind layer 1; which"),
        ({0: [7, 8, 9], 1: [7, 8, 9], 2: [7, 8, 1]}, "Rank 2 differs from the others in the tokens they sampled."),
        ({0: [5, 8, 9], 1: [7, 8, 9], 2: [7, 8, 1]}, "Rank 0 differs from the others in what the embedding gave."),
        ({0: [0, 0, 5, 9], 1: [0, 0, 6, 9]}, "somewhere up to and behind layer 1"),
        ({0: [7, 3, 0, 0, 5, 9], 1: [7, 3, 0, 0, 6, 9]}, "in the residual stream behind one of the layers 1 to 3;"),
        ({rank: [rank % 2, 1] for rank in range(4)}, "Ranks 0, 1, 2 and 3 differ"),
    ],
)
def test_who_disagrees_and_where_it_begins(marks: dict[int, list[int]], words: str | None) -> None:
    found = disagreement(marks)
    assert found is None if words is None else words in (found or "")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("fault", "tp", "named"),
    [
        ("flip 1@2", 3, "Rank 1 differs from the others in the residual stream behind layer 1."),
        ("flip 0@3", 2, "Ranks 0 and 1 differ in the residual stream behind layer 2;"),
    ],
)
def test_a_bit_that_flips_once_costs_nobody_the_right_answer(
    fault: str,
    tp: int,
    named: str,
    tiny_llama: Path,
    committed: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found in the very step, which is not answered with but computed again."""
    with LLM(tiny_llama, progress=False, num_blocks=64) as llm:
        wanted = answers(llm)
    committed(fault)
    with (
        caplog.at_level(logging.WARNING, "phalanx.engine"),
        LLM(tiny_llama, tp=tp, progress=False, num_blocks=64) as llm,
    ):
        assert answers(llm) == wanted
        assert answers(llm) == wanted
        assert llm.engine.scheduler.preemptions == len(PROMPTS)
    assert f"Step 5: {named}" in caplog.text


def test_layers_take_turns_until_one_is_suspected() -> None:
    """In a few steps all are looked at, in every step the last two, and by all ranks the same ones."""
    canary, stream = Canary(30, torch.device("cpu")), torch.randn(4, 8)

    def looked_at(step: int) -> set[int]:
        canary.begin(step)
        for place in range(31):
            canary.mark(place, stream)
        return set(canary.marks.nonzero().flatten().tolist())

    turns = [looked_at(step) for step in range(7, 15)]
    assert all({29, 30} <= turn and 9 <= len(turn) <= 10 for turn in turns)
    assert set().union(*turns[:4]) == set(range(31))
    assert turns[4:] == turns[:4]
    canary.look_at_every_layer(True)
    assert looked_at(8) == looked_at(9) == set(range(31))
    canary.look_at_every_layer(False)
    assert looked_at(7) == turns[0]
    fresh = Canary(30, torch.device("cpu"))
    for place in range(31):
        fresh.mark(place, stream)
    assert fresh.marks.nonzero().flatten().tolist() == [29, 30], "as on a GPU, where nobody begins a step"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("fault", "tp", "named"), [("garble 2@40", 3, "Rank 2 differs"), ("garble 0@1", 2, "Ranks 0 and 1")]
)
def test_messages_that_keep_coming_wrong_end_the_engine(
    fault: str, tp: int, named: str, tiny_llama: Path, committed: Callable[[str], None]
) -> None:
    committed(fault)
    with LLM(tiny_llama, tp=tp, progress=False, num_blocks=64) as llm:
        with pytest.raises(EngineDeadError, match=f"second time.*{named}") as caught:
            answers(llm)
        assert caught.value.code == "fabric"


def test_a_bit_of_any_weight_is_found_in_one_pass(some_reference: Reference) -> None:
    model = load_model(EngineConfig(), Checkpoint(some_reference.folder), Solo(), lambda done, total: None)
    watch = WeightWatch(model)
    parts = dict(model.parts())
    for name in random.sample(sorted(parts), 12):
        tensor = parts[name]
        assert isinstance(tensor, torch.Tensor)
        bit = random.randrange(8 * tensor.nbytes)
        faults.flip_bit(tensor, bit)
        with pytest.raises(EngineDeadError, match=f"{name} on rank 0"):
            one_pass(watch)
        faults.flip_bit(tensor, bit)
    one_pass(watch)


@needs_compiler
@pytest.mark.parametrize("model", MODELS)
def test_a_bit_of_any_weight_that_lies_in_panels_or_beside_them_is_found_too(tmp_path: Path, model: str) -> None:
    """Codes, scales and minimums of matrices and experts; norms and routers as they are."""
    spared = dict[str, torch.Tensor]()
    lay_out = Decoder.lay_out

    def remembering(decoder: Decoder) -> None:
        spared.update({name: part for name, part in decoder.parts() if isinstance(part, torch.Tensor)})
        lay_out(decoder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "lay_out", remembering)
        path = gguf_of(tmp_path, model, Kind.Q4_1)
        loaded = load_model(EngineConfig(device="cpu"), Checkpoint(path), Solo(), lambda done, total: None)
    watch = WeightWatch(loaded)
    names = {"model.layers.1.input_layernorm.weight", "model.norm.weight"}
    assert names | ({"model.layers.0.mlp.gate.weight"} if model == "qwen3_moe" else set()) <= set(spared)
    layer = loaded.layers[1]
    panels = {
        "model.embed_tokens.weight": loaded.embedding.weight,
        r"layers\.1\.self_attn\.q_proj and .*k_proj and .*v_proj": layer.mixer.qkv.product.weight,  # type: ignore[attr-defined]
    }
    if model == "qwen3_moe":
        panels["an expert of layer 1"] = layer.ffn.held.down.matrices[2]  # type: ignore[union-attr]
    in_panels = ((name, part) for name, weight in panels.items() for part in vars(weight).values())
    for name, tensor in [*spared.items(), *in_panels]:
        if isinstance(tensor, torch.Tensor):
            bit = random.randrange(8 * tensor.nbytes)
            faults.flip_bit(tensor, bit)
            with pytest.raises(EngineDeadError, match=f"{name}.* on rank 0"):
                one_pass(watch)
            faults.flip_bit(tensor, bit)
    one_pass(watch)


def test_what_lies_at_even_distances_is_read_at_once() -> None:
    """Experts in their stacks, one of which is left out, beside a matrix alone; each stretch has its own digest."""
    stack, scales, alone = torch.randn(6, 4, 32), torch.randn(6, 8), torch.randn(32)
    stretches = [
        Stretch(f"{name} {expert}", words_of(part[expert].flatten()))
        for expert in (0, 1, 2, 4, 5)
        for name, part in (("matrix", stack), ("scales", scales))
    ]
    turn = WatchTurn.of([*stretches, Stretch("alone", words_of(alone))])
    assert [len(rows) for rows in turn.rows] == [3, 2, 3, 2, 1]
    by_name = {piece.name: int(plain_digests(piece.words)) for piece in stretches} | {
        "alone": int(plain_digests(words_of(alone)))
    }
    assert dict(zip(turn.names, turn.digests().tolist(), strict=True)) == by_name
    assert turn.names[:3] == ["matrix 0", "matrix 1", "matrix 2"]


def one_pass(watch: WeightWatch) -> None:
    for _ in range(watch.steps):
        reading = watch.read()
        if reading is not None:
            watch.check(reading)


@pytest.mark.usefixtures("forked_ranks")
def test_a_damaged_weight_ends_the_engine_within_a_pass_and_names_the_rank(
    tiny_llama: Path, committed: Callable[[str], None]
) -> None:
    committed("weight 1@2")
    with LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as llm:
        with pytest.raises(EngineDeadError, match=r"layers\.2\.mlp\.down_proj\.weight on rank 1") as caught:
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert caught.value.code == "weight_damaged"


SAMPLED = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def breaking(tiny_llama: Path) -> Iterator[LLM]:
    """Token 7 is embedded as infinity, and token 9 becomes NaN in layer 2."""
    with LLM(tiny_llama, progress=False, canary=False, speculate="ngram") as llm:
        model = llm.engine.runner.model  # type: ignore[attr-defined]
        model.embedding.weight[7] = float("inf")
        ffn = model.layers[2].ffn
        given = lambda x, step: ffn(x, step).masked_fill((step.tokens == 9)[:, None], float("nan"))  # noqa: E731
        model.layers[2].ffn = type("Broken", (), {"takes": Form.PLAIN, "__call__": staticmethod(given)})()
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, msgspec.structs.replace(SAMPLED, logprobs=2)])
def test_a_request_whose_numbers_break_ends_with_the_layer_and_the_others_go_on(
    breaking: LLM, params: SamplingParams
) -> None:
    engine, wanted = breaking.engine, breaking.generate([3, 5, 8], params).token_ids
    prompts = [[3, 7, *range(30, 50)], [3, 5, 8], [3, *range(30, 50), 7]]
    for _ in range(2):
        bad, good, late = (engine.add(prompt, params) for prompt in prompts)
        while engine.has_work:
            engine.step()
        for request in (bad, late):
            assert request.error is not None
            assert request.error.code == "not_finite"
            assert request.error.found.endswith("in the embedding.")
        assert (good.error, good.output) == (None, wanted)
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_blocks
    with pytest.raises(RequestError, match=r"At token 1 .* in layer 2\."):
        breaking.generate([9], params)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_blocks_of_a_request_that_broke_do_no_harm(references: Callable[[str], Reference], family: str) -> None:
    """The next ones have them as they were left, behind their own last tokens."""
    with LLM(references(family).folder, progress=False, canary=False, num_blocks=8) as llm:
        wanted = llm.generate([3, 5, 8], GREEDY).token_ids
        llm.engine.runner.model.embedding.weight[7] = float("nan")  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match="ceased to be finite"):
            llm.generate([7, *range(20, 90)], GREEDY)
        for _ in range(8):
            assert llm.generate([3, 5, 8], GREEDY).token_ids == wanted


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_find_the_layer_together(tiny_llama: Path) -> None:
    """What only rank 0 holds is wrong: its part of a sum makes all of it infinite."""
    with LLM(tiny_llama, tp=2, progress=False, num_blocks=64) as llm:
        wanted = answers(llm)
        mixer = llm.engine.runner.runner.model.layers[1].mixer  # type: ignore[attr-defined]
        saved = mixer.output.product.weight.clone()
        mixer.output.product.weight.fill_(3e38)
        with pytest.raises(RequestError, match=r"in layer 1\."):
            llm.generate([5, 6, 7], GREEDY)
        mixer.output.product.weight.copy_(saved)
        assert answers(llm) == wanted
