"""An acceptance that is forced is the one that is had, on random weights, with a head that does its work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.bench.forced import ForcedSpeculation
from phalanx.bench.offline import run_cases, table_of_drafts, time_both
from phalanx.bench.timing import FixedBatch
from phalanx.cli import app
from phalanx.engine.speculation import Speculation
from phalanx.errors import ConfigError
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.start import start_engine
from tests.conftest import tiny_config


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts pay is a matter of a machine's clock."""
    monkeypatch.setattr(Speculation, "_share_of_one_more", lambda speculation, tokens: 0.0)


@pytest.mark.parametrize(("speculate", "acceptance"), [("mtp", 1.0), ("mtp", 0.5), ("ngram", 0.0)])
def test_drafts_come_true_as_often_as_they_are_told_to(speculate: str, acceptance: float, tmp_path: Path) -> None:
    config = tiny_config("glm4_moe", num_nextn_predict_layers=1).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = EngineConfig(
        speculate=speculate, speculate_tokens=3, load_format="dummy", device="cpu", max_num_seqs=8, max_model_len=64
    )
    engine = start_engine(asked, tmp_path, lambda done, total: None)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    timing, told = time_both(engine, FixedBatch(2, 5, 40), 1, acceptance)
    engine.close()
    assert told is not None
    assert told.drafts >= 3
    assert told.accepted / told.drafts == pytest.approx(acceptance, abs=0.35 if acceptance == 0.5 else 0.0)
    assert (told.draft_share > 0) == (speculate == "mtp")
    assert told.step_ms >= told.tpot_ms * (1.0 if acceptance < 1 else 1.5)
    assert engine.scheduler.speculation is speculation
    table = table_of_drafts([("2x5x40", timing.tpot * 1e3, told), ("without", 1.0, None)])
    assert table is not None
    assert table.row_count == 1
    assert table_of_drafts([("without", 1.0, None)]) is None


def test_a_row_ends_at_the_first_draft_that_does_not_come_true() -> None:
    """So two drafts in a row are right as often as both coins fall well, also in a short run."""
    for rows, off in ((50, 0.03), (1000, 0.005)):
        forced = ForcedSpeculation(3, 0.8, by_ranks=False)
        right = [forced.right([0, 0, 0], [1, 1, 1]) for _ in range(rows)]
        for drafts, share in ((1, 0.8), (2, 0.64), (3, 0.512)):
            assert sum(each >= drafts for each in right) / rows == pytest.approx(share, abs=off)


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "deepseek_v3"])
def test_the_command_times_drafts_on_random_weights_alone_and_as_a_rank_of_several(name: str, tmp_path: Path) -> None:
    """As it is run on a GPU: nothing but a configuration is there, and its head has random weights too."""
    heads = {"mtp_num_hidden_layers" if name.startswith("qwen") else "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name).to_dict() | heads))
    drafts = ["--speculate", "mtp", "--speculate-tokens", "3", "--acceptance", "0.8", "--json", str(tmp_path / "out")]
    for emulated in ([], ["--emulate-tp", "2", "--all-reduce-us", "1"]):
        asked = ["bench", "offline", str(tmp_path), "--cases", "1x5x20", "--load-format", "dummy", "--repeats", "1"]
        answer = CliRunner().invoke(app, [*asked, *drafts, *emulated])
        assert answer.exit_code == 0, answer.output
        (result,) = json.loads((tmp_path / "out").read_text())["results"]
        assert result["speculated"]["drafts"] >= 3
        assert 0 < result["speculated"]["accepted"] <= result["speculated"]["drafts"]


@pytest.mark.parametrize(("speculate", "acceptance"), [("off", 0.8), ("mtp", None), ("ngram", 1.5)])
def test_an_acceptance_wants_somebody_who_drafts(speculate: str, acceptance: float | None) -> None:
    with pytest.raises(ConfigError, match="accept"):
        run_cases(EngineConfig(speculate=speculate), "1x2x2", 1, None, acceptance)
