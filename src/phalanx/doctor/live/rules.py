"""Why it is slow: rules over a picture of an engine at work, each with its evidence and what to do.

Where one fault explains another, only the cause is told: a slow rank lets the others wait, a slow link fills steps with
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from phalanx.doctor.finding import Finding
from phalanx.doctor.live.link import LinkSeen
from phalanx.doctor.live.picture import Picture

MUCH = 0.30
"""Of a step in collectives."""
IDLE = 0.10
SLOWER = 0.10
"""By how much a rank's work exceeds the middle of the others'."""
_MOSTLY_LAST = 0.6
_LINK = 1.6
_MATTERS = 0.05
"""Of a step: what a slow rank or link costs less is not worth a word."""
_UNEVEN = 0.15
_LOW_BANDWIDTH, _LOW_ARITHMETIC = 0.35, 0.25
_THRASH = 0.05
_FEW_ROWS = 8
_LITTLE_LONGER = 1.5
"""Than a decode step: a step with prompts that takes no more than this is mostly reading weights."""

Rule = Callable[[Picture], Finding | None]


def findings_of(picture: Picture) -> list[Finding]:
    """All that the rules find, causes before their effects."""
    found: list[Finding] = []
    for rule in RULES:
        finding = rule(picture)
        if finding is not None:
            found.append(finding)
    return causes_of(found)


def causes_of(*findings: Sequence[Finding]) -> list[Finding]:
    """Of what was found in several ways, each once, without what others explain."""
    found = {finding.code: finding for each in reversed(findings) for finding in each}
    explained = set().union(*(_EXPLAINS.get(code, set()) for code in found))
    order = [rule.__name__ for rule in RULES]
    causes = [finding for code, finding in found.items() if code not in explained]
    return sorted(causes, key=lambda each: order.index(each.code) if each.code in order else len(order))


_EXPLAINS = {
    "slow_link": {"collectives", "no_overlap"},
    "slow_rank": {"collectives"},
    "uneven_layout": {"collectives"},
    "host_gaps": {"low_bandwidth", "below_expected"},
    "collectives": {"no_overlap", "below_expected"},
    "graphs_missed": {"host_gaps", "low_bandwidth"},
}


def slow_rank(seen: Picture) -> Finding | None:
    """One rank that takes longer for its share than the others for theirs, and that they wait for."""
    if len(seen.worked) < 2 or (seen.last and max(seen.last) < _MOSTLY_LAST):
        return None
    share = seen.share or [1.0] * len(seen.worked)
    per_share = [worked / part for worked, part in zip(seen.worked, share, strict=True)]
    rank = per_share.index(max(per_share))
    others = median(per_share[:rank] + per_share[rank + 1 :])
    if others <= 0 or per_share[rank] / others - 1 < SLOWER or (seen.last and seen.last[rank] < _MOSTLY_LAST):
        return None
    if (per_share[rank] - others) * share[rank] < _MATTERS * seen.step:
        return None
    more = per_share[rank] / others - 1
    last = f", and came last to {seen.last[rank]:.0%} of the collectives" if seen.last else ""
    return Finding(
        "warning", "slow_rank", f"Rank {rank} is slower than the others",
        f"it worked {seen.worked[rank]:.2f} ms a step, {more:.0%} more than the others for the same share{last}",
        "Every collective waits for the last rank: all run at its speed.",
        "Look at its card: clocks, heat and power (phalanx doctor), its memory rate (--measure), and who else uses it "
        "or its cores.",
    )  # fmt: skip


def uneven_layout(seen: Picture) -> Finding | None:
    """Shares that the layout itself deals unevenly."""
    if len(seen.share) < 2:
        return None
    most, mean = max(seen.share), sum(seen.share) / len(seen.share)
    if most / mean - 1 < _UNEVEN:
        return None
    return Finding(
        "warning", "uneven_layout", "The model does not divide evenly among these ranks",
        f"rank {seen.share.index(most)} has {most / mean - 1:.0%} more than the mean",
        "Whole heads and blocks are dealt; the others wait for who has most.",
        f"Use a TP degree that divides its heads; the Layout view shows which. {seen.ranks} does not.",
    )  # fmt: skip


def slow_link(seen: Picture) -> Finding | None:
    """Collectives that take much longer than this link should."""
    between = _slow_between_machines(seen.link) if seen.link is not None else None
    if between is not None:
        return between
    if not seen.exchanged or not seen.exchange_expected:
        return None
    ratio = seen.exchanged / seen.exchange_expected
    if ratio < _LINK or seen.exchanged - seen.exchange_expected < _MATTERS * seen.step:
        return None
    return Finding(
        "warning", "slow_link", "Collectives take longer than this link should",
        f"{seen.exchanged:.2f} ms a step once all ranks were there, {ratio:.1f} times the "
        f"{seen.exchange_expected:.2f} ms of the cost model",
        "A link at a part of its speed slows every layer twice.",
        "Measure it: phalanx doctor --measure. Then look at NVLink states and errors, PCIe width, and NCCL's choice of "
        "transport.",
    )  # fmt: skip


def _slow_between_machines(link: LinkSeen) -> Finding | None:
    ratio = link.took / link.expected
    if ratio < _LINK or link.took - link.expected < _MATTERS * link.step:
        return None
    *most, last = link.between
    which = "The link" if len(most) == 1 else "A link"
    due = _rate(link.expected_rate)
    due = f"{due} can be expected of its network cards" if link.by_cards else f"it had {due} when the ranks joined"
    return Finding(
        "warning", "slow_link", f"{which} between {', '.join(most)} and {last} is slow",
        f"{_rate(link.rate)} each way, where {due}: all-reduces take {link.took:.2f} ms a step once all ranks are "
        f"there, {ratio:.1f} times the {link.expected:.2f} ms that they should take",
        "Every layer waits for it twice.",
        "Look at both ends: the speed that the cards agreed on (phalanx cluster status), their errors and drops "
        "(ethtool -S), cable and switch port; then at who else uses the link.",
    )  # fmt: skip


def _rate(bytes_per_second: float) -> str:
    megabits = bytes_per_second * 8e-6
    return f"{megabits / 1e3:.1f} Gbit/s" if megabits >= 1e3 else f"{megabits:.0f} Mbit/s"


def collectives(seen: Picture) -> Finding | None:
    if seen.exchanged is None or seen.waited is None or not seen.step:
        return None
    part = (seen.exchanged + seen.waited) / seen.step
    if part <= MUCH:
        return None
    few = seen.decodes <= _FEW_ROWS
    return Finding(
        "warning", "collectives", f"Collectives take {part:.0%} of a step",
        f"{seen.exchanged:.2f} ms exchanging and {seen.waited:.2f} ms waiting of {seen.step:.2f} ms, with "
        f"{seen.decodes:.0f} rows on {seen.ranks} ranks",
        "Their latency does not shrink with the ranks' shares." if few else "More ranks add waiting here, not speed.",
        _fewer_ranks(seen, few),
    )  # fmt: skip


def _fewer_ranks(seen: Picture, few: bool) -> str:
    """Replicas on CPUs would share the cores that ranks share now."""
    if not seen.on_gpus:
        return "Use fewer ranks: on CPUs they share the cores; phalanx lab measures which TP pays."
    replicas = f"Use fewer ranks and more replicas: TP={max(1, seen.ranks // 2)} twice"
    return replicas + (", or more requests at once." if few else "; phalanx lab measures which TP pays.")


def no_overlap(seen: Picture) -> Finding | None:
    """Long collectives of prompts, which could run beside products."""
    if not seen.prompt_exchanged or not seen.prompt_step or seen.prompt_step <= _LITTLE_LONGER * seen.step:
        return None
    if seen.prompt_exchanged < 0.15 * seen.prompt_step:
        return None
    return Finding(
        "note", "no_overlap", "Collectives of prompts overlap with nothing",
        f"{seen.prompt_exchanged:.2f} ms of a prompt step of {seen.prompt_step:.2f} ms",
        "Phalanx runs collectives in line with the layers.",
        "Where prompts dominate, use fewer ranks a replica.",
    )  # fmt: skip


def host_gaps(seen: Picture) -> Finding | None:
    if not seen.idle or not seen.step or seen.idle / seen.step <= IDLE:
        return None
    return Finding(
        "warning", "host_gaps", "Ranks wait for the host between steps",
        f"{seen.idle:.2f} ms of {seen.step:.2f} ms a step",
        "Scheduling, reading tokens or the API took that long, or the process was not given a core.",
        "Give the engine a core of its own (taskset, fewer neighbours), look for swapping and for other work on the "
        "host; grammars and logprobs of many rows cost host time too.",
    )  # fmt: skip


def low_bandwidth(seen: Picture) -> Finding | None:
    """Decodes that read weights and cache much slower than the memory could."""
    if seen.least is None or not seen.worked:
        return None
    achieved = seen.least / max(seen.worked)
    if achieved >= _LOW_BANDWIDTH:
        return None
    return Finding(
        "warning", "low_bandwidth", "Decodes are far from what memory allows",
        f"{achieved:.0%} of it with {seen.decodes:.0f} rows: {max(seen.worked):.2f} ms of work a step, "
        f"{seen.least:.2f} ms would do",
        "Too many small kernels, or memory slower than its data sheet.",
        "Measure memory (phalanx doctor --measure). More requests at once use the same reads for more tokens.",
    )  # fmt: skip


def low_arithmetic(seen: Picture) -> Finding | None:
    """Prompts that are multiplied much slower than the matrix units could."""
    if seen.prompt_least is None or not seen.prompt_worked:
        return None
    achieved = seen.prompt_least / seen.prompt_worked
    if achieved >= _LOW_ARITHMETIC:
        return None
    return Finding(
        "warning", "low_arithmetic", "Prompts are far from what arithmetic allows",
        f"{achieved:.0%} of it: {seen.prompt_worked:.2f} ms of work a step with prompts, {seen.prompt_least:.2f} ms "
        "would do",
        "Clocks held down by heat or power, kernels that use no matrix units, or few tokens a step.",
        "Look at clocks and power (phalanx doctor), measure the matrix rate (--measure), and raise "
        "--max-num-batched-tokens.",
    )  # fmt: skip


def chunk_small(seen: Picture) -> Finding | None:
    """Prompts are cut by the budget although a step with a full budget takes little longer than one without."""
    if not seen.prompt_step or not seen.step or seen.budget is None or not seen.waiting:
        return None
    if (seen.prompt_full or 0.0) < 0.8 or seen.prompt_step > _LITTLE_LONGER * seen.step:
        return None
    return Finding(
        "warning", "chunk_small", "Prompts are cut into small pieces",
        f"{seen.prompt_full:.0%} of the prompt steps were full at {seen.budget} tokens and took "
        f"{seen.prompt_step / seen.step:.2f} times a decode step; {seen.waiting:.0f} requests waited",
        "Weights are read for every piece: larger pieces cost hardly more.",
        f"Raise --max-num-batched-tokens, to {2 * seen.budget} first.",
    )  # fmt: skip


def graphs_missed(seen: Picture) -> Finding | None:
    if seen.in_graphs is None or seen.in_graphs >= 0.9:
        return None
    return Finding(
        "warning", "graphs_missed", "Decode steps run outside of CUDA graphs",
        f"{1 - seen.in_graphs:.0%} of them",
        "Launched kernel by kernel, a step waits for the host.",
        "Rows of drafts, more rows than --max-num-seqs, or a family whose kernels do not serve graphs: see "
        "docs/engine.md.",
    )  # fmt: skip


def preemption_thrash(seen: Picture) -> Finding | None:
    if seen.preemptions is None or seen.preemptions <= _THRASH:
        return None
    return Finding(
        "warning", "preemption_thrash", "Requests are preempted and computed again",
        f"{seen.preemptions:.2f} a step",
        "The KV cache is too small for what runs at once: work is done twice.",
        "Lower --max-num-seqs, give the KV cache more memory, or halve its bytes (--kv-cache-dtype fp8).",
    )  # fmt: skip


def prefix_misses(seen: Picture) -> Finding | None:
    """Prompts that share a beginning which is computed again and again."""
    if seen.repeated is None or seen.found is None or seen.repeated < 0.3 or seen.found >= 0.5 * seen.repeated:
        return None
    return Finding(
        "warning", "prefix_misses", "A shared prefix is not found in the cache",
        f"{seen.repeated:.0%} of the prompts' tokens stand in other prompts too, {seen.found:.0%} were found",
        "The same keys and values are computed again.",
        "Do not switch prefix caching off; give the KV cache more memory; clients with different keys share only with "
        "--share-prefixes, and what varies (dates, ids) belongs behind the shared part.",
    )  # fmt: skip


def below_expected(seen: Picture) -> Finding | None:
    """Tokens that come slower than the plan's interval for this very load."""
    if seen.token_gap is None or seen.expected_gap is None or seen.token_gap <= seen.expected_gap[2]:
        return None
    mid, _, high = seen.expected_gap
    return Finding(
        "warning", "below_expected", "Tokens come slower than expected of this load",
        f"{seen.token_gap:.1f} ms between tokens, {mid:.1f} expected and {high:.1f} at most",
        "Steps take longer than the cost model says, or ranks wait.",
        "Take a trace (phalanx trace --url): it says which part.",
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    slow_rank,
    uneven_layout,
    slow_link,
    collectives,
    no_overlap,
    graphs_missed,
    host_gaps,
    low_bandwidth,
    low_arithmetic,
    chunk_small,
    preemption_thrash,
    prefix_misses,
    below_expected,
)
