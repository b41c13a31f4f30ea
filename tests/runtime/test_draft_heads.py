"""Heads that draft say what transformers' own layers say, and change no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from phalanx.engine.agenda import Drafted
from phalanx.engine.drafting import Drafting
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.gemm import FourBitGemm
from phalanx.layers import vocabulary
from phalanx.layers.draft_head import DraftHeadPart
from phalanx.layers.vocabulary import Head, ShortlistHead
from phalanx.runtime.draft_graphs import DraftGraphs, DraftKind, _is_near
from phalanx.runtime.drafting import Drafts
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.runtime.runner import TorchRunner
from tests.conftest import LOGIT_NOISE, Reference
from tests.heads import LAST_LAYER, HeadReference
from tests.runtime.replays import Repeater
from tests.threaded_ranks import ThreadedEngine

CHECKED = 6


def check_drafts(head: HeadReference, prompts: list[list[int]], tp: int, in_graphs: bool = False) -> None:
    """Of prompts in chunks, and behind drafts that were wrong."""
    threaded = ThreadedEngine(head.folder, tp, prefix_caching=False, speculate="mtp", max_num_seqs=12, num_blocks=80)
    for runner in threaded.runner.ranks if in_graphs else ():
        recorder = Repeater(runner.model.place.group)
        runner.prompt_graphs = PromptGraphs(runner.model, runner.batch, recorder, runner.limits[1])
        assert runner.drafting is not None
        runner.draft_graphs = DraftGraphs(runner.drafting, runner.batch, recorder, 3)
    engine, made = threaded.engine, []
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation.ahead = lambda requests: 3  # type: ignore[method-assign]
    speculation.drafts_stay = False
    requests = [engine.add(prompt, SamplingParams(max_tokens=6, temperature=0.0)) for prompt in prompts]
    while engine.has_work:
        engine.step()
        made += [(list(request.tokens), list(request.drafts)) for request in requests if request.drafts]
    assert speculation.totals.draft_tokens > 10
    for tokens, drafts in made[:: max(1, len(made) // CHECKED)]:
        assert head.confirms(tokens, drafts), (tokens, drafts)
    threaded.close()


@pytest.mark.parametrize("reference", LAST_LAYER, indirect=True)
def test_drafts_are_those_of_the_reference(reference: Reference, heads: Callable[[str], HeadReference]) -> None:
    check_drafts(heads(reference.name), reference.prompts[1:5], 1)


@pytest.mark.parametrize("reference", ["deepseek_v3", "qwen3_5_text"], indirect=True)
def test_drafts_in_graphs_are_those_of_the_reference(
    reference: Reference, heads: Callable[[str], HeadReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps in graphs, and themselves in graphs where a step has no prompt."""
    replayed, run = [], DraftGraphs.run

    def noted(graphs: DraftGraphs, plan: StepPlan, hidden: Tensor, sampled: Tensor) -> Drafts | None:
        replayed.append(plan.counts)
        return run(graphs, plan, hidden, sampled)

    monkeypatch.setattr(DraftGraphs, "run", noted)
    monkeypatch.setattr(TorchRunner, "_forward", lambda *_: pytest.fail("a step was not padded"))
    check_drafts(heads(reference.name), reference.prompts[1:4], 1, in_graphs=True)
    assert any(len(counts) > 1 for counts in replayed)
    assert any(max(counts) > 1 for counts in replayed)


def in_tiles_of_e4m3(weight: Tensor) -> Tensor:
    """What is left of a matrix in FP8, tile by tile."""
    found = weight.clone()
    for tile in (part for band in found.split(128) for part in band.split(128, 1)):
        scale = tile.abs().max() / 448
        tile.copy_((tile / scale).to(torch.float8_e4m3fn).float() * scale)
    return found


def in_fp8(part: DraftHeadPart) -> None:
    assert isinstance(part.head, Head)
    plain, states = part.head.product, torch.randn(3, part.place.spec.hidden)
    part.head = part.head.narrowed()
    expected = states @ in_tiles_of_e4m3(plain.weight).T
    assert torch.allclose(part.head.product(states), expected, atol=1e-4)
    assert not torch.allclose(plain(states), expected, atol=1e-4)


def in_four_bits(part: DraftHeadPart) -> None:
    assert isinstance(part.head, Head)
    part.head = ShortlistHead(part.head)


def made_drafts(
    folder: Path,
    prompts: list[list[int]],
    temperature: float = 0.0,
    narrow: Callable[[DraftHeadPart], None] | None = None,
) -> list[int]:
    """Those behind the first tokens of answers."""
    threaded = ThreadedEngine(folder, 2, prefix_caching=False, speculate="mtp", max_num_seqs=12, num_blocks=80)
    for runner in threaded.runner.ranks:
        assert runner.model.draft_head is not None
        if narrow is not None:
            narrow(runner.model.draft_head)
    speculation = threaded.engine.scheduler.speculation
    assert speculation is not None
    speculation.ahead = lambda requests: 3  # type: ignore[method-assign]
    speculation.drafts_stay = False
    requests = [
        threaded.engine.add(prompt, SamplingParams(max_tokens=2, temperature=temperature, seed=index, ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]
    made: dict[int, list[int]] = {}
    while threaded.engine.has_work:
        threaded.engine.step()
        made |= {request.id: list(request.drafts) for request in requests if request.drafts}
    threaded.close()
    return [draft for request in requests for draft in made[request.id]]


@pytest.mark.parametrize("reference", ["deepseek_v3", "qwen3_5_text", "deepseek_v4"], indirect=True)
def test_a_head_in_fewer_bits_makes_much_the_same_drafts(
    reference: Reference, heads: Callable[[str], HeadReference]
) -> None:
    """Four bits alone make two in three of the same, drawn ones one in two: the best are looked at again."""
    folder = heads(reference.name).folder
    prompts = [prompt[:length] for prompt in reference.prompts[1:5] for length in (3, 6, 9)]
    for temperature, narrow, least in ((0.0, in_fp8, 0.8), (0.0, in_four_bits, 0.9), (0.3, in_four_bits, 0.75)):
        whole, narrowed = (made_drafts(folder, prompts, temperature, way) for way in (None, narrow))
        assert len(whole) == len(narrowed) > 20
        assert sum(map(int.__eq__, whole, narrowed)) > least * len(whole), narrow


@pytest.mark.parametrize("reference", ["qwen3_5_text"], indirect=True)
def test_many_rows_are_scored_by_the_head_itself(
    reference: Reference, heads: Callable[[str], HeadReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = heads(reference.name).folder, reference.prompts[1:5]
    monkeypatch.setattr(vocabulary, "MOST_SHORTLISTED", 0)
    monkeypatch.setattr(FourBitGemm, "__call__", lambda *_: pytest.fail("a few bits for many rows"))
    for temperature in (0.0, 1.0):
        assert made_drafts(folder, prompts, temperature) == made_drafts(folder, prompts, temperature, in_four_bits)


@pytest.mark.parametrize(
    ("reference", "temperature"), [("deepseek_v3", 1.0), ("qwen3_5_text", 0.0)], indirect=["reference"]
)
def test_drafts_that_stay_are_those_that_are_told(
    reference: Reference, heads: Callable[[str], HeadReference], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose drafts the engine does not know hold the same ones, as far as there was room for them, and yield the
    same tokens.
    """
    found: list[list[list[int]]] = []
    rows: list[list[tuple[int, int, list[int]]]] = []
    settle = Drafting._settle

    def noted(drafting: Drafting, row: Drafted, accepted: int) -> None:
        rows[-1].append((row.request.id, row.start, list(row.drafts)))
        settle(drafting, row, accepted)

    monkeypatch.setattr(Drafting, "_settle", noted)
    for stay in (False, True):
        threaded = ThreadedEngine(heads(reference.name).folder, 2, speculate="mtp", max_num_seqs=12, num_blocks=80)
        engine, speculation = threaded.engine, threaded.engine.scheduler.speculation
        assert speculation is not None
        assert speculation.drafts_stay
        speculation.drafts_stay = stay
        speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
        speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
        speculation.ahead = lambda requests: 3  # type: ignore[method-assign]
        rows.append([])
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, presence_penalty=0.5, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in reference.prompts[1:5]]
        while engine.has_work:
            engine.step()
        found.append([request.tokens for request in requests])
        threaded.close()
    assert found[0] == found[1]
    told, stayed = ({(id, start): drafts for id, start, drafts in each} for each in rows)
    assert stayed.keys() <= told.keys()
    assert sum(map(len, stayed.values())) > 0.8 * sum(map(len, told.values())) > 40
    for row, drafts in stayed.items():
        assert all(one == other for one, other in zip(drafts, told[row], strict=False)), row


@pytest.mark.parametrize("reference", ["deepseek_v3", "glm4_moe"], indirect=True)
def test_the_reference_is_that_of_transformers(
    reference: Reference, heads: Callable[[str], HeadReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has heads itself. It looks for them behind the layers of the published models."""
    head, kind = heads(reference.name), type(reference.model)
    last = reference.model.config.num_hidden_layers
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{last}\..*"])
    main = AutoModelForCausalLM.from_pretrained(head.folder, dtype=torch.float32).eval()
    mtp = MtpModel.from_pretrained(main).eval()
    tokens = reference.prompts[3]
    with torch.inference_mode():
        _, logits, _ = mtp(
            input_ids=torch.tensor([tokens[1:]]),
            last_hidden_states=main.model(torch.tensor([tokens[:-1]])).last_hidden_state,
            attention_mask=None,
            position_ids=torch.arange(1, len(tokens))[None],
            mtp_cache=MtpCache(config=main.config.get_mtp_config()),
        )
    assert torch.allclose(head.scores(tokens, [0])[0], logits[0, 0], atol=LOGIT_NOISE)


@pytest.mark.parametrize(
    ("held", "is_near"),
    [
        (DraftKind(32, 8, 3, drawn=False), True),
        (DraftKind(48, 16, 3, drawn=False), True),
        (DraftKind(32, 32, 3, drawn=False), False),
        (DraftKind(32, 8, 3, drawn=True), False),
        (DraftKind(32, 8, 4, drawn=False), False),
        (DraftKind(128, 16, 3, drawn=False), False),
    ],
)
def test_a_graph_stands_in_for_good_only_where_it_takes_hardly_longer(held: DraftKind, is_near: bool) -> None:
    """One that draws tokens, or guesses for every row of each sequence, takes a fifth longer."""
    assert _is_near(held, DraftKind(24, 8, 3, drawn=False)) is is_near
