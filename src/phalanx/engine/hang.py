"""A hang has a name: which rank stopped, where, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from phalanx.engine.whereabouts import IN_CALL, Where

_FIXES = {
    "rank_stopped": "Something stopped its process, a signal or a debugger: continue it with kill -CONT, or end it.",
    "rank_silent": "Its process or its machine hangs: look at dmesg there.",
    "order_lost": "It waits for work that others have begun: what told it was lost. Start the engine again.",
    "message_lost": "The fabric between the ranks lost it: check links, memory and driver. Start the engine again.",
    "gpu_silent": "The GPU hangs or has fallen off the bus: look for Xid in dmesg, and reset it.",
    "gpus_wait": "A kernel hangs or a GPU no longer answers: look for Xid in dmesg. If steps are that slow, let them.",
    "rank_behind": "It computes, or its kernel hangs: its stack says where. If steps are that slow here, let it.",
}


class RankSeen(msgspec.Struct, frozen=True):
    """A rank as others see it. `state` is the letter that the system has for its process, empty if not known."""

    where: Where
    silent: bool = False
    state: str = ""


class Hang(msgspec.Struct, frozen=True):
    """The ranks it is about, and why. Where it is not `certain`, they may just be slow."""

    ranks: list[int]
    code: str
    found: str
    stack: str = ""

    @property
    def fix(self) -> str:
        return _FIXES[self.code]

    @property
    def certain(self) -> bool:
        return self.code not in ("rank_behind", "gpus_wait")


def name_hang(ranks: Mapping[int, RankSeen]) -> Hang | None:
    """Who holds up a step in which nothing moves any more; None if nobody waits for anybody."""
    if not any(seen.where.busy for seen in ranks.values()):
        return None
    step = max(seen.where.begun for seen in ranks.values())
    for code, is_so, found in (
        ("rank_stopped", lambda seen: seen.state in ("T", "t"), "is stopped"),
        ("rank_silent", lambda seen: seen.silent, "gives no sign of life"),
        ("order_lost", lambda seen: seen.where.begun < step, f"has not begun step {step}"),
    ):
        blamed = [rank for rank, seen in ranks.items() if is_so(seen)]
        if blamed:
            return _blame(code, found, blamed, ranks)
    return _name_hang_in_step(ranks)


def _name_hang_in_step(ranks: Mapping[int, RankSeen]) -> Hang | None:
    """All live and are in one step. At the collective that the least far has begun, all have arrived."""
    if not any(seen.where.waits for seen in ranks.values()):
        return None
    mute = [rank for rank, seen in ranks.items() if seen.where.reached < 0]
    if 0 < len(mute) < len(ranks):
        return _blame("gpu_silent", "gets no answer from its GPU", mute, ranks)
    by_device = all(seen.where.reached >= 0 for seen in ranks.values())
    far = {rank: seen.where.reached if by_device else seen.where.calls for rank, seen in ranks.items()}
    least_far = [rank for rank in ranks if far[rank] == min(far.values())]
    waiting = [rank for rank in least_far if ranks[rank].where.waits == IN_CALL]
    if waiting:
        return _blame("message_lost", "waits though all others have arrived", waiting, ranks)
    if len(least_far) == len(ranks):
        return _blame("gpus_wait", "has launched all and waits for its GPU", least_far, ranks)
    return _blame("rank_behind", "is behind", least_far, ranks)


def _blame(code: str, found: str, blamed: list[int], ranks: Mapping[int, RankSeen]) -> Hang:
    told = [f"Rank {rank} {found}: {position(ranks[rank].where)}." for rank in blamed]
    return Hang(blamed, code, " ".join([*told, *who_waits(ranks, blamed)]))


def position(where: Where) -> str:
    """What a page says, in words."""
    if not where.busy:
        return f"idle behind step {where.ended}, {where.calls} collectives done"
    device = f", its GPU at meeting {where.reached}" if where.reached >= 0 else ""
    inside = "in" if where.waits == IN_CALL else "behind"
    return f"step {where.begun}, {where.place_name}, {inside} {where.call_name}{device}"


def who_waits(ranks: Mapping[int, RankSeen], blamed: Iterable[int]) -> list[str]:
    """Where each of the others is: those that wait have arrived at the collective that the blamed have not."""
    others = {rank: seen.where for rank, seen in ranks.items() if rank not in blamed}
    return [f"Rank {rank} {'waits' if where.waits else 'is'}: {position(where)}." for rank, where in others.items()]
