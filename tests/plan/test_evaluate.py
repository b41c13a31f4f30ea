"""The evaluation: right arithmetic, every row accounted for, and the promises made about the calibration file."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.engine.step_sums import StepSums
from phalanx.models import catalog
from phalanx.plan.cases import prepare
from phalanx.plan.evaluate import Evaluation, EvaluationError, Row, Score, draw, evaluate
from phalanx.plan.held_out import read_cases
from phalanx.plan.measurements import COLUMNS, INDEPENDENT_COLUMNS, Measurement, MeasurementError, read_measurements
from phalanx.plan.predict import Interval
from tests.shared_data import shared_file

FILE = "serving_measurements.csv"
KEYS = {"median_ape", "mean_ape", "bias", "within_10", "within_20", "coverage_90"}
LINE = {
    "engine": "vllm",
    "version": "0.10.2",
    "gpu": "H100 SXM",
    "tp": "4",
    "ep": "1",
    "model": "nvidia/Llama-3.3-70B-Instruct-FP8",
    "precision": "fp8",
    "kv_dtype": "fp8",
    "isl": "1024",
    "osl": "1024",
    "concurrency": "4",
    "ttft_ms": "80.5",
    "tpot_ms": "11.776",
    "length_rule": "uniform 0.8-1.0",
}


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**LINE, **change} for change in changes)
    return path


def sample(path: Path, wanted: dict[str, set[str]]) -> Path:
    """Rows of the calibration file whose columns are among these."""
    with shared_file(FILE).open() as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] in values for name, values in wanted.items())]
    return write(path, *({name: row[name] for name in COLUMNS} for row in rows))


def test_scores_are_plain_arithmetic() -> None:
    pairs = [(Interval(1.09, 0.9, 1.3), 1.0), (Interval(0.7, 0.6, 0.8), 1.0), (Interval(1.15, 0.5, 2.0), 1.0)]
    score = Score.of(pairs)
    assert score.median_ape == pytest.approx(0.15)
    assert score.mean_ape == pytest.approx((0.09 + 0.3 + 0.15) / 3)
    assert score.bias == pytest.approx(0.09)
    assert score.within_10 == pytest.approx(1 / 3)
    assert score.within_20 == pytest.approx(2 / 3)
    assert score.coverage_90 == pytest.approx(2 / 3)


def test_a_row_is_predicted_near_what_was_measured(tmp_path: Path) -> None:
    report = evaluate(write(tmp_path / "one.csv", {}))
    (row,) = report.rows
    assert row.tpot is not None
    assert row.ttft is not None
    assert row.tpot.mid == pytest.approx(0.011776, rel=0.08)
    assert row.ttft.low < 0.0805 < row.ttft.high


def test_the_report_has_the_promised_shape(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.csv", {}, {"concurrency": "8"}, {"tp": "8"}, {"gpu": "H300"}, {"model": "nobody/unknown"}
    )
    told = evaluate(path).to_dict()
    assert told.keys() == {"overall", "bad_rows", "unpredicted", "groups"}
    assert (told["overall"]["rows"], told["overall"]["predicted"]) == (5, 3)
    assert told["overall"]["tpot"].keys() == told["overall"]["ttft"].keys() == KEYS
    groups = {(group["gpu"], group["tp"]): group for group in told["groups"] if group["model"].startswith("nvidia")}
    assert {key: (group["rows"], group["predicted"]) for key, group in groups.items()} == {
        ("H100 SXM", 4): (2, 2),
        ("H100 SXM", 8): (1, 1),
        ("H300", 4): (1, 0),
    }
    assert groups["H300", 4]["tpot"] is None


def test_rows_it_cannot_predict_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", {}, {"gpu": "H300"}, {"engine": "tgi"}, {"tp": "128"})
    problems = [row.problem for row in evaluate(path).unpredicted]
    assert [row.measurement.line for row in evaluate(path).unpredicted] == [3, 4, 5]
    assert len(problems) == 3
    assert "H300" in problems[0]
    assert "tgi" in problems[1]
    assert "128" in problems[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": "four"}, "four"),
        ({"isl": ""}, "invalid literal"),
        ({"tpot_ms": "fast"}, "fast"),
        ({"tpot_ms": "-3"}, "tpot is -0.003"),
        ({"concurrency": "0"}, "concurrency is 0"),
        ({"ttft_ms": "nan"}, "ttft is nan"),
        ({"precision": "fp4"}, "'fp4' is no number format"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"ttft_ms": "", "tpot_ms": ""}, "nothing was measured"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_the_rest_is_evaluated(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    report = evaluate(write(tmp_path / "bad.csv", {}, change, {"concurrency": "8"}))
    (bad,) = report.bad
    assert bad.line == 3
    assert said in bad.problem
    assert report.to_dict()["overall"]["predicted"] == 2
    assert report.to_dict()["bad_rows"] == [{"line": 3, "problem": bad.problem}]


INDEPENDENT = {
    "source": "someone",
    "kind": "offline",
    "engine": "trtllm",
    "version": "1.0",
    "gpu": "H100-SXM",
    "n_gpus": "4",
    "tp": "2",
    "model": "Llama-3.3-70B",
    "format": "fp8-channel",
    "kv": "fp8",
    "isl": "512",
    "osl": "128",
    "spread": "0",
    "concurrency": "64",
    "requests": "64",
    "rate": "",
    "out_tps": "2000",
    "ttft_ms": "",
    "tpot_ms": "",
    "express": "yes",
    "tier": "current",
}


def write_independent(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, INDEPENDENT_COLUMNS)
        writer.writeheader()
        writer.writerows({**INDEPENDENT, **change} for change in changes)
    return path


def test_published_throughput_is_of_all_replicas(tmp_path: Path) -> None:
    two, one = evaluate(write_independent(tmp_path / "o.csv", {}, {"n_gpus": "2", "requests": "32"})).rows
    assert two.measurement.replicas == 2
    assert two.throughput is not None
    assert one.throughput is not None
    assert two.throughput.mid == pytest.approx(2 * one.throughput.mid)


def test_what_a_plan_cannot_say_is_counted_not_guessed(tmp_path: Path) -> None:
    report = evaluate(write_independent(tmp_path / "o.csv", {}, {"express": "disaggregated"}, {"kind": "dream"}))
    assert [row.problem != "" for row in report.rows] == [False, True]
    assert "disaggregated" in report.unpredicted[0].problem
    assert "dream" in report.bad[0].problem


def test_ranks_that_share_experts_alone_have_traffic_of_their_own(tmp_path: Path) -> None:
    """Eight ranks, each with an eighth of the requests, whole attention layers, and an eighth of the experts' reads."""
    sparse = {"model": "Qwen3-235B-A22B", "n_gpus": "8", "tp": "8", "gpu": "H200-SXM"}
    path = write_independent(tmp_path / "o.csv", sparse, sparse | {"express": "attention-DP"})
    split, apart = (prepare(row) for row in read_measurements(path).measurements)
    assert (split.workload.concurrency, apart.workload.concurrency) == (64, 8)
    assert apart.limits.work.linear_bytes > 6 * split.limits.work.linear_bytes
    many = 100_000
    assert apart.limits.work.experts_read(many) == pytest.approx(split.limits.work.experts_read(many), rel=0.02)
    assert 0 < apart.limits.of(StepSums(8, 4800)).all_reduce < split.limits.of(StepSums(64, 38400)).all_reduce
    told = evaluate(path).rows[1].throughput
    assert told is not None
    assert told.low < told.mid < told.high


def test_stages_of_a_pipeline_are_read_and_share_the_traffic(tmp_path: Path) -> None:
    piped = {"express": "pipeline", "n_gpus": "8", "tp": "2"}
    path = write_independent(tmp_path / "o.csv", piped, {"n_gpus": "8", "tp": "2"})
    stages, replicas = (prepare(row) for row in read_measurements(path).measurements)
    assert (stages.measurement.stages, stages.measurement.replicas) == (4, 1)
    assert (replicas.measurement.stages, replicas.measurement.replicas) == (1, 4)
    assert stages.workload.concurrency == replicas.workload.concurrency
    assert stages.limits.between is not None
    told = evaluate(path)
    assert not told.unpredicted
    piped_tps, plain_tps = (row.throughput.mid for row in told.rows if row.throughput)
    assert piped_tps < plain_tps, "hand-overs, and stages that wait for the one with the head"


def test_rows_with_drafts_are_told_by_what_was_published_or_given(tmp_path: Path) -> None:
    drafted = {"express": "speculative", "model": "DeepSeek-V3", "format": "fp8", "gpu": "H200-SXM", "engine": "sglang"}
    drafted |= {"n_gpus": "8", "tp": "8", "concurrency": "1", "requests": "10", "kind": "closed"}
    path = write_independent(tmp_path / "o.csv", drafted, drafted | {"express": "yes"}, {"express": "speculative"})
    told = evaluate(path)
    with_drafts, without, headless = told.rows
    assert with_drafts.tpot is not None
    assert without.tpot is not None
    assert 1.5 < without.tpot.mid / with_drafts.tpot.mid < 2.61
    assert "no head that drafts" in headless.problem
    (row, _, _) = read_measurements(path).measurements
    assert prepare(row).workload.acceptance == pytest.approx(0.72, abs=0.01)  # 1 + a + a^2 + a^3 = 2.61
    assert prepare(replace(row, acceptance=0.5)).workload.acceptance == 0.5
    assert prepare(row).rules.max_sequences == 48
    small = prepare(replace(row, model="Qwen3-32B", draft_model="Qwen3-0.6B", precision="bf16", acceptance=0.6))
    assert small.drafting is not None
    assert small.drafting.work.layers == len(catalog.model("Qwen3-0.6B").layers)
    assert [case.measurement.speculates for case in read_cases([path])] == [False], "such rows are never fitted"


def test_states_of_a_row_are_read_in_the_bits_they_are_kept_in(tmp_path: Path) -> None:
    qwen = {"model": "Qwen3.5-35B-A3B", "format": "bf16", "gpu": "H200-SXM", "n_gpus": "1", "tp": "1"}
    (row,) = read_measurements(write_independent(tmp_path / "o.csv", qwen)).measurements
    wide, narrow = (prepare(replace(row, state_dtype=asked)).limits.work.state_bytes for asked in ("auto", "bf16"))
    assert 0.5 < narrow / wide < 0.52


def test_the_goals_ask_for_their_folder_and_name_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import plan_goals

    with pytest.raises(SystemExit) as left:
        plan_goals.files_of([])
    assert left.value.code == 2
    assert "the following arguments are required: DATA" in capsys.readouterr().err
    for name in plan_goals.FILES[:2]:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        plan_goals.files_of([str(tmp_path)])
    assert f"{tmp_path} has no independent_measurements.csv" in capsys.readouterr().err
    (tmp_path / plan_goals.FILES[2]).touch()
    assert plan_goals.files_of([str(tmp_path)]) == [tmp_path / name for name in plan_goals.FILES]


def test_a_whole_publisher_is_left_out(tmp_path: Path) -> None:
    """Had the fit seen the rows of the publisher, it would follow them when they are all twice as slow."""
    pytest.importorskip("numpy")
    honest = [{"source": who, "isl": size} for who in ("a", "b", "c") for size in ("256", "512", "1024")]
    slow = [row | {"out_tps": "400"} if row["source"] == "a" else row for row in honest]
    told, moved = (
        evaluate(write_independent(tmp_path / "rows.csv", *rows), leave_out="publisher").rows for rows in (honest, slow)
    )
    for before, after in zip(told[:3], moved[:3], strict=True):
        assert before.throughput is not None
        assert after.throughput is not None
        assert before.throughput.mid == pytest.approx(after.throughput.mid, rel=1e-6)
    assert told[5].throughput != moved[5].throughput
    with pytest.raises(EvaluationError, match="publisher, gpu, family"):
        evaluate(tmp_path / "rows.csv", leave_out="weather")


@pytest.mark.parametrize(
    ("lengths", "sequences", "tokens"), [((1000, 1000), 640, 2048), ((128, 128), 4096, 8192), ((2048, 128), 512, 9216)]
)
def test_tensorrt_llm_s_own_benchmark_sets_its_limits(lengths: tuple[int, int], sequences: int, tokens: int) -> None:
    """8B in FP8 leaves 76 GB of an H100, 95 % of which hold 551, 4,305 and 506 requests of 64 KiB a token."""
    row = Measurement(
        "trtllm", "1.0", "H100-SXM", 1, 1, "Llama-3.1-8B", "fp8", "fp8", *lengths, 4096, None, None, throughput=1.0,
        kind="offline", requests=9000,
    )  # fmt: skip
    rules = prepare(row).rules
    assert (rules.max_sequences, rules.max_batched_tokens) == (sequences, tokens)
    before = prepare(replace(row, version="0.14")).rules
    assert (before.max_sequences, before.max_batched_tokens) == (2048, 8192)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(MeasurementError, match="engine, version"):
        evaluate(tmp_path / "other.csv")
    with pytest.raises(MeasurementError, match="no rows"):
        evaluate(write(tmp_path / "empty.csv"))


def test_one_fold_is_none(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="at least 2"):
        evaluate(write(tmp_path / "one.csv", {}), folds=1)


def test_the_table_ends_with_all_rows(tmp_path: Path) -> None:
    table = evaluate(write(tmp_path / "rows.csv", {}, {"tp": "8"}, {"gpu": "H300"})).table()
    assert table.row_count == 4
    assert list(table.columns[4].cells)[-1] == "2 of 3"


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measurement = read_measurements(write(tmp_path / "one.csv", {})).measurements[0]
    rows = tuple(
        Row(replace(measurement, engine=engine), Interval(0.01, 0.009, 0.011), Interval(0.1, 0.05, 0.2))
        for engine in ("vllm", "sglang")
    )
    draw(Evaluation(rows), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_low_concurrency_rows_of_the_calibration_file_are_met(tmp_path: Path) -> None:
    path = sample(tmp_path / "low.csv", {"concurrency": {"4", "8"}, "osl": {"128", "256", "1024"}})
    told = evaluate(path).to_dict()["overall"]
    assert told["predicted"] == told["rows"] > 100
    assert told["tpot"]["median_ape"] < 0.05
    assert told["ttft"]["median_ape"] < 0.15


def test_series_held_out_are_met(tmp_path: Path) -> None:
    """A small cross-validation: one engine and model, a TP degree at a time unseen."""
    pytest.importorskip("numpy")
    path = sample(tmp_path / "some.csv", {"engine": {"vllm"}, "concurrency": {"4"}, "version": {"0.10.2", "0.18.0"}})
    told = evaluate(path, folds=4).to_dict()["overall"]
    assert told["predicted"] == told["rows"] > 20
    assert told["tpot"]["median_ape"] < 0.12


class TestReading:
    """What a row says, and what it leaves unsaid."""

    def measurement(self, tmp_path: Path, **change: str) -> Measurement:
        return read_measurements(write(tmp_path / "row.csv", change)).measurements[0]

    def test_lengths(self, tmp_path: Path) -> None:
        assert prepare(self.measurement(tmp_path)).workload.spread == 0.2
        assert prepare(self.measurement(tmp_path, length_rule="fixed")).workload.spread == 0

    def test_formats(self, tmp_path: Path) -> None:
        llama = {"model": "meta-llama/Llama-3.1-8B-Instruct", "kv_dtype": ""}
        half = prepare(self.measurement(tmp_path, **llama, precision="bf16")).limits.work
        small = prepare(self.measurement(tmp_path, **llama, precision="fp8")).limits.work
        assert small.linear_bytes == pytest.approx(half.linear_bytes / 2, rel=0.01)
        assert self.measurement(tmp_path, kv_dtype="").kv_dtype == "fp8"
        assert self.measurement(tmp_path, **llama).kv_dtype == "bf16"

    def test_rules(self, tmp_path: Path) -> None:
        assert prepare(self.measurement(tmp_path)).rules.max_batched_tokens == 8192
        assert prepare(self.measurement(tmp_path, length_rule="fixed")).rules.max_batched_tokens == 2048
        trtllm = prepare(self.measurement(tmp_path, engine="trtllm", version="1.1"))
        assert (trtllm.rules.admission, trtllm.rules.max_batched_tokens) == ("whole", 1024 + 128)

    @pytest.mark.parametrize(
        ("told", "tokens", "polled"),
        [
            ({"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200 SXM", "tp": "8", "concurrency": "64"}, 32768, 30),
            ({"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200 SXM", "tp": "8", "concurrency": "8"}, 32768, 10),
            ({"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200 SXM", "tp": "4", "concurrency": "64"}, 8192, 10),
            ({"model": "deepseek-ai/DeepSeek-R1", "gpu": "H200 SXM", "tp": "8", "concurrency": "64"}, 32768, 1),
            ({"model": "Qwen/Qwen3.5-397B-A17B", "gpu": "H200 SXM", "tp": "8", "concurrency": "64"}, 16384, 1),
        ],
    )
    def test_sglang_as_inferencex_launches_it(
        self, tmp_path: Path, told: dict[str, str], tokens: int, polled: int
    ) -> None:
        rules = prepare(self.measurement(tmp_path, engine="sglang", version="0.5.9", **told)).rules
        assert (rules.admission, rules.max_batched_tokens, rules.poll_steps) == ("first", tokens, polled)

    def test_all_reduces_as_inferencex_asks_for_them(self, tmp_path: Path) -> None:
        """With the norm in them in SGLang on B200, which nobody else is told to do."""
        row = self.measurement(tmp_path, engine="sglang", model="deepseek-ai/DeepSeek-R1", gpu="B200 SXM", tp="8")
        assert prepare(row).limits.implementation == "flashinfer"
        for other in (replace(row, length_rule=""), replace(row, gpu="H200-SXM")):
            assert prepare(other).limits.implementation == "sglang"
        vllm = replace(row, engine="vllm", version="0.18.0")
        assert prepare(vllm).limits.implementation == "flashinfer"
        assert prepare(replace(vllm, gpu="H200-SXM")).limits.implementation == "vllm"

    def test_keys_and_values_as_inferencex_keeps_them(self, tmp_path: Path) -> None:
        deepseek = {"model": "deepseek-ai/DeepSeek-R1", "kv_dtype": "", "tp": "8"}
        for engine, gpu, kept in (
            ("sglang", "B200 SXM", "fp8"),
            ("sglang", "H200 SXM", "bf16"),
            ("trtllm", "H200 SXM", "fp8"),
            ("vllm", "B200 SXM", "bf16"),
        ):
            assert self.measurement(tmp_path, **deepseek, engine=engine, gpu=gpu).kv_dtype == kept

    def test_a_host_that_caches_prefixes_of_states_does_not_work_ahead(self, tmp_path: Path) -> None:
        """InferenceX turns SGLang's prefix cache off; others, and plans, leave it on."""
        row = self.measurement(tmp_path, engine="sglang", model="Qwen/Qwen3.5-397B-A17B", gpu="B200 SXM", tp="8")
        assert prepare(row).limits.habits.overlaps
        assert not prepare(replace(row, length_rule="")).limits.habits.overlaps
        plain = replace(row, length_rule="", model="Qwen3-32B")
        assert prepare(plain).limits.habits.overlaps

    def test_ranks_of_their_own_have_room_beside_whole_layers(self) -> None:
        """Maverick in FP8 on 8 H100: attention is on every rank, the experts are shared."""
        row = Measurement(
            "trtllm", "1.0", "H100-SXM", 8, 1, "Llama-4-Maverick", "fp8-channel", "fp8", 1000, 1000, 3000, None, None,
            throughput=1.0, kind="offline", requests=3000, attention_ranks=8,
        )  # fmt: skip
        apart = prepare(row).kv_tokens
        assert apart is not None
        assert apart < 200_000, "of 96 KiB each, beside whole attention layers"

    def test_a_cache_that_is_too_small_bounds_the_run(self, tmp_path: Path) -> None:
        assert prepare(self.measurement(tmp_path)).kv_tokens is None
        short = prepare(self.measurement(tmp_path, tp="2", osl="8192", concurrency="64")).kv_tokens
        assert short is not None
        assert 300_000 < short < 64 * 9216
