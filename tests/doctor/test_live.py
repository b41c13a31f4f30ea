"""Each fault of a running engine, in virtual time: exactly the right finding, with its evidence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.doctor.finding import Finding
from phalanx.doctor.live import Picture, causes_of, findings_of, picture_of
from phalanx.doctor.live.rules import RULES
from phalanx.engine.marks import LinkPace
from phalanx.spec.machine import Gpu, Machine
from phalanx.web.notes import notes_of
from phalanx.web.sampler import RankSample, Sample
from tests.trace.made import make_traces

H100 = Gpu.named("H100-SXM")
ROWS = 32 * 8192 * 2
"""Bytes of an all-reduce of 32 rows of a 70B model; of one row it is a 32nd."""


def exchange_us(ranks: int, size: int = ROWS) -> float:
    link = Machine((H100,) * ranks).link(ranks)
    return all_reduce_seconds(size, ranks, link, profile("phalanx").all_reduce) * 1e6


def judged(*args: object, **kwargs: object) -> list[Finding]:
    return findings_of(picture_of(make_traces(*args, **kwargs)))  # type: ignore[arg-type]


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


EVEN = [100.0] * 8
FABRIC = exchange_us(8)


def test_a_healthy_engine_has_no_findings() -> None:
    assert judged(EVEN, FABRIC, 5) == []
    assert judged([100.0]) == []
    assert findings_of(Picture()) == []


def test_a_rank_slowed_by_30_percent() -> None:
    (finding,) = judged([*EVEN[:5], 130.0, *EVEN[6:]], FABRIC, 5)
    assert finding.code == "slow_rank"
    assert finding.title.startswith("Rank 5 ")
    assert "30% more" in finding.found
    assert "100% of the collectives" in finding.found


def test_a_link_at_half_speed() -> None:
    (finding,) = judged([60.0] * 8, 2 * FABRIC, 5)
    assert finding.code == "slow_link"
    assert "2.0 times" in finding.found


def test_a_host_that_sleeps() -> None:
    (finding,) = judged(EVEN, FABRIC, 400)
    assert finding.code == "host_gaps"
    assert "0.40 ms" in finding.found


def test_a_batch_of_one_on_eight_ranks() -> None:
    (finding,) = judged([8.0] * 8, exchange_us(8, ROWS // 32), 1, decodes=1, size=ROWS // 32)
    assert finding.code == "collectives"
    assert "1 rows on 8 ranks" in finding.found
    assert "TP=4 twice" in finding.fix


@pytest.mark.parametrize(
    ("code", "given"),
    [
        ("uneven_layout", {"work_us": [100, 100, 140], "weights": [10**9, 10**9, 14 * 10**8]}),
        ("preemption_thrash", {"work_us": EVEN, "preempted": 1}),
        ("prefix_misses", {"work_us": EVEN, "prompts": (1000, 800, 100)}),
        ("graphs_missed", {"work_us": EVEN, "in_graphs": 2}),
        ("low_bandwidth", {"work_us": EVEN, "weights": [4 * 10**8] * 8}),
        (
            "chunk_small",
            {"work_us": EVEN, "prompt_tokens": lambda step: 480 * (step % 2), "budget": 512, "waiting": 3,
             "prompt_factor": 1.2},
        ),
        (
            "low_arithmetic",
            {"work_us": [100.0], "prompt_tokens": lambda step: 4000 * (step % 2), "prompt_factor": 20, "flops": 0.7e9},
        ),
        (
            "no_overlap",
            {"work_us": [40.0] * 8, "prompt_tokens": lambda step: 480 * (step % 2), "prompt_factor": 2,
             "exchange_us": 0.25 * 40},
        ),
    ],
)  # fmt: skip
def test_each_other_fault(code: str, given: dict[str, object]) -> None:
    ranks = len(given["work_us"])  # type: ignore[arg-type]
    assert codes(judged(**{"exchange_us": exchange_us(ranks), "pause_us": 5, **given})) == [code]


def test_what_is_fine_beside_each_fault() -> None:
    """The same evidence, a little less of it."""
    assert judged([*EVEN[:5], 108.0, *EVEN[6:]], FABRIC, 5) == []
    assert judged([60.0] * 8, 1.3 * FABRIC, 5) == []
    assert judged(EVEN, FABRIC, 50) == []
    assert judged(EVEN, FABRIC, 5, prompts=(1000, 800, 700)) == []
    assert judged(EVEN, FABRIC, 5, in_graphs=6) == []
    prompts = {"prompt_tokens": lambda step: 4000 * (step % 2), "prompt_factor": 20}
    assert judged([100.0], flops=1.5e9, **prompts) == []
    assert judged([100.0], flops=0.4e9, **prompts) == [], "what takes long to launch says nothing of arithmetic"


MET = LinkPace(10e-6, 5e9)
"""What an all-reduce took when two machines had met: 115 us of 512 KiB."""
APART = {"nodes": ("spark-0", "spark-1"), "device": "cpu"}


def between(took: float, work: Sequence[float] = (440, 440), met: LinkPace = MET, **more: object) -> list[Finding]:
    """Two machines on which all-reduces take so many times what they did when the ranks had met."""
    size = more.setdefault("size", ROWS)
    given: dict[str, object] = {"pause_us": 5, "paces": [met] * len(work), **APART, **more}
    return judged(work, took * met.seconds(size) * 1e6, **given)  # type: ignore[arg-type]


def test_a_link_between_machines_at_half_speed_is_named() -> None:
    assert between(1.0) == []
    assert between(1.5) == []
    (finding,) = between(2.0)
    assert (finding.code, finding.title) == ("slow_link", "The link between spark-0 and spark-1 is slow")
    assert finding.found.startswith("18.3 Gbit/s each way, where it had 36.5 Gbit/s when the ranks joined: ")
    assert "take 1.84 ms a step" in finding.found
    assert "2.0 times the 0.92 ms" in finding.found
    (several,) = between(2.0, [400, 400, 400], nodes=("a", "b", "c"))
    assert several.title == "A link between a, b and c is slow"
    assert between(2.0, [8000, 8000]) == [], "of steps this long it is too little to matter"


def test_other_faults_of_two_machines_are_no_slow_link() -> None:
    assert codes(between(1.0, [440, 570])) == ["slow_rank"]
    assert codes(between(1.0, pause_us=1000)) == ["host_gaps"]
    small = 4096
    assert "slow_link" not in codes(between(5.0, [5, 5], size=small)), "small ones tell of cores, not of links"
    some_steps = {"prompt_tokens": lambda step: 480 * (step % 2), "prompt_factor": 3}
    assert "slow_link" not in codes(between(1.0, **some_steps)), "a link is slow for all of them"
    assert "slow_link" not in codes(between(2.0, steps=0))
    assert "slow_link" not in codes(between(2.0, nodes=("one", "one"))), "memory is no link"
    assert "slow_link" not in codes(between(2.0, paces=[MET, None]))


def test_a_link_that_was_slow_from_the_start_is_held_against_its_cards() -> None:
    """20 MB/s: less than half of what TCP makes of a gigabit."""
    slow, size = LinkPace(100e-6, 20e6, card=125e6), 2**18
    (finding,) = between(1.0, [9000, 9000], slow, size=size)
    assert finding.code == "slow_link"
    assert "can be expected of its network cards" in finding.found
    assert "slow_link" not in codes(between(1.0, [9000, 9000], msgspec.structs.replace(slow, card=0.0), size=size))
    assert "slow_link" not in codes(between(1.0, [9000, 9000], msgspec.structs.replace(slow, card=30e6), size=size))
    enough = LinkPace(100e-6, 60e6, card=25e9)
    assert "slow_link" not in codes(between(1.0, [9000, 9000], enough, size=size)), "fast cards tell little of TCP"


def test_gpus_of_several_machines_are_not_held_against_what_joins_those_of_one() -> None:
    far = {"nodes": ["here"] * 4 + ["there"] * 4}
    assert codes(judged(EVEN, 4 * FABRIC, 5)) == ["slow_link"]
    assert "slow_link" not in codes(judged(EVEN, 4 * FABRIC, 5, **far))


def test_sparks_are_held_against_the_network_that_the_catalogue_has_for_them() -> None:
    spark = Gpu.named("DGX-Spark")
    usual = all_reduce_seconds(ROWS, 2, spark.link, profile("phalanx").all_reduce)
    given = {"device": "NVIDIA GB10", "nodes": APART["nodes"], "weights": [6 * 10**8] * 2}
    assert judged([400, 400], 1e6 * usual, 5, **given) == []
    for pace in (None, LinkPace(33e-6, ROWS / usual / 3)):
        assert codes(judged([400, 400], 3e6 * usual, 5, paces=[pace] * 2, **given)) == ["slow_link"]


def test_a_rank_that_costs_the_others_nothing_is_not_slow() -> None:
    assert codes(judged([10, 12], 400, 5, device="cpu")) == ["collectives"]


def test_what_a_trace_and_a_minute_find_is_told_once_and_without_what_it_explains() -> None:
    def found(code: str, title: str = "") -> Finding:
        return Finding("warning", code, title, "", "", "")

    assert codes(causes_of([found("collectives")], [found("slow_rank")])) == ["slow_rank"]
    assert codes(causes_of([found("slow_rank")], [found("host_gaps"), found("collectives")])) == [
        "slow_rank", "host_gaps"
    ]  # fmt: skip
    (told,) = causes_of([found("host_gaps", "by the trace")], [found("host_gaps", "by the minute")])
    assert told.title == "by the trace"
    assert causes_of([], []) == []


def test_expectations() -> None:
    late = Picture(step=10, token_gap=30.0, expected_gap=(20.0, 15.0, 25.0))
    assert codes(findings_of(late)) == ["below_expected"]
    assert findings_of(msgspec.structs.replace(late, token_gap=24.0)) == []


def test_every_rule_has_been_seen_here_and_stands_in_the_docs() -> None:
    text, docs = Path(__file__).read_text(), Path(__file__).parents[2] / "docs" / "trace.md"
    assert [rule.__name__ for rule in RULES if f'"{rule.__name__}"' not in text] == []
    assert re.findall(r"^\| `(\w+)` \|", docs.read_text().partition("## What the rules find")[2], re.MULTILINE) == [
        rule.__name__ for rule in RULES
    ]


def sample(*ranks: list[float], busy: float = 0.98, preemptions: int = 0, working: float = 1.0) -> Sample:
    """A second of an engine with ranks of these parts of a step."""
    return Sample(
        time=0.0, up=True, inputs=0.0, cached=0.0, outputs=100.0, expected_out=None, ttft=None, itl=None, itl_mean=None,
        expected_itl=None, running=4.0, waiting=0.0, held=0.5, kept=0.1, hits=None, preemptions=preemptions,
        accepted=None, steps=20.0,
        ranks=[RankSample(parts, busy) for parts in ranks], working=working,
    )  # fmt: skip


PLAIN = [0.1, 1.0, 38.0, 9.0, 1.0]


def test_the_last_minute_of_a_server() -> None:
    even = [1.0, 1.0]
    assert notes_of([sample(PLAIN, PLAIN)] * 30, False, even) == []
    assert notes_of([sample(PLAIN, PLAIN, busy=0.7)] * 5, False, even) == []
    assert codes(notes_of([sample(PLAIN, PLAIN, busy=0.7)] * 30, False, even)) == ["host_gaps"]
    assert notes_of([sample(PLAIN, PLAIN, busy=0.7, working=0.7)] * 30, False, even) == [], "nobody asked for more"
    assert codes(notes_of([sample(PLAIN, [0, 1, 29, 18, 1])] * 30, False, even)) == ["slow_rank"]
    assert notes_of([sample(PLAIN, [0, 1, 29, 18, 1])] * 30, False, [38 / 33.5, 29 / 33.5]) == []
    assert codes(notes_of([sample(PLAIN, PLAIN, preemptions=3)] * 30, False, even)) == ["preemption_thrash"]
    busy = [0.1, 1.0, 28.0, 20.0, 1.0]
    (found,) = notes_of([sample(busy, busy)] * 30, False, even)
    assert found.code == "collectives"
    assert "share the cores" in found.fix
    assert "replicas" not in found.fix
