"""Whom pages blame."""

from __future__ import annotations

import pytest

from phalanx.engine.hang import Hang, RankSeen, name_hang
from phalanx.engine.whereabouts import ALL_REDUCE, FOR_DEVICE, HEAD, IN_CALL, Where

INSIDE = Where(10, 5, 4, 6, ALL_REDUCE, 42, IN_CALL)
COMPUTES = Where(11, 5, 4, 5, ALL_REDUCE, 41)
LEFT = Where(12, 5, 4, 6, ALL_REDUCE, 42)
AHEAD = Where(13, 5, 4, 7, ALL_REDUCE, 43, IN_CALL)
IDLE = Where(14, 4, 4, HEAD, 2, 36)
LAUNCHED = Where(15, 5, 3, HEAD, 2, 90, FOR_DEVICE)


def named(*ranks: Where | RankSeen) -> Hang | None:
    return name_hang({n: each if isinstance(each, RankSeen) else RankSeen(each) for n, each in enumerate(ranks)})


@pytest.mark.parametrize(
    ("ranks", "code", "blamed", "told"),
    [
        ((INSIDE, RankSeen(COMPUTES, state="T")), "rank_stopped", [1], "Rank 1 is stopped: step 5, layer 2 (FFN)"),
        ((INSIDE, RankSeen(COMPUTES, silent=True, state="D")), "rank_silent", [1], "behind all-reduce 41"),
        ((INSIDE, IDLE, INSIDE), "order_lost", [1], "has not begun step 5: idle behind step 4, 36 collectives done"),
        ((INSIDE, COMPUTES, INSIDE), "rank_behind", [1], "Rank 2 waits: step 5, layer 3 (mixer), in all-reduce 42."),
        ((INSIDE, INSIDE), "message_lost", [0, 1], "Rank 0 waits though all others have arrived"),
        ((INSIDE, LEFT), "message_lost", [0], "Rank 1 is: step 5, layer 3 (mixer), behind all-reduce 42."),
        ((INSIDE, AHEAD, INSIDE), "message_lost", [0, 2], "Rank 1 waits: step 5, layer 3 (FFN), in all-reduce 43."),
        ((LAUNCHED, LAUNCHED), "gpus_wait", [0, 1], "the head, behind gather of the logits 90"),
    ],
)
def test_who_is_blamed(ranks: tuple[Where | RankSeen, ...], code: str, blamed: list[int], told: str) -> None:
    hang = named(*ranks)
    assert hang is not None
    assert (hang.code, hang.ranks) == (code, blamed)
    assert told in hang.found
    assert hang.fix
    assert hang.certain == (code not in ("rank_behind", "gpus_wait"))


def test_a_gpu_knows_better_than_its_host() -> None:
    """Both hosts have launched all; rank 1's GPU is two meetings behind, and does not wait in one."""
    met = Where(15, 5, 3, HEAD, 2, 90, IN_CALL, reached=83)
    hang = named(met, Where(16, 5, 3, HEAD, 2, 90, FOR_DEVICE, reached=80))
    assert hang is not None
    assert (hang.code, hang.ranks) == ("rank_behind", [1])
    assert "its GPU at meeting 80" in hang.found


def test_a_gpu_that_does_not_answer() -> None:
    met = Where(15, 5, 3, HEAD, 2, 90, IN_CALL, reached=83)
    hang = named(met, LAUNCHED, met)
    assert hang is not None
    assert (hang.code, hang.ranks, hang.certain) == ("gpu_silent", [1], True)


@pytest.mark.parametrize("ranks", [(IDLE, IDLE), (COMPUTES, COMPUTES), (LEFT,), ()])
def test_nobody_waits_for_anybody(ranks: tuple[Where, ...]) -> None:
    assert named(*ranks) is None
