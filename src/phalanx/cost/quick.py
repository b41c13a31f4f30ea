"""The price of a step, quickly: a simulation asks for thousands, most of which share their number of tokens."""

from __future__ import annotations

from phalanx.cost.price import (
    MOST_OF_PEAK,
    Rates,
    Roofline,
    combine,
    host_seconds,
    launch_seconds,
    least_multiplying,
    least_reading,
    with_host,
)
from phalanx.engine.step_sums import StepSums

_ELSEWHERE = dict.fromkeys(("head_read", "head_compute", "cache_read", "prompt_attention", "rows", "sent"), 0.0)
"""Parts of a step that its number of tokens does not settle."""


class QuickPrice:
    """`factor` x the seconds that `combine` gives a step, `least_seconds` at least: the same sums, in other order.

    What depends on a step's number of tokens, or of rows that are sampled, is worked out once for each.
    """

    def __init__(self, roofline: Roofline, rates: Rates, factor: float) -> None:
        self._roofline, self._rates, self._factor = roofline, rates, factor
        self._on_gpu = rates.without_host
        self._habits = roofline.habits
        self._of_tokens: dict[tuple[int, bool], tuple[float, float, float, float, float]] = {}
        self._of_sampled: dict[int, tuple[float, float, float]] = {}
        work = roofline.work
        self._bandwidth, self._peak = roofline.memory_bandwidth, roofline.attention_peak
        self._cache, self._cache_windows = _by_reach(work.cache_bytes)
        self._pairs, self._pair_windows = _by_reach(work.pair_flops)
        self._state = work.state_bytes
        self._row_seconds = 0.0 if roofline.habits.is_native else 1e-6 * rates.row_us

    def __call__(self, step: StepSums) -> float:
        decodes, prompt_tokens = step.decodes, step.prompt_tokens
        key = (decodes + prompt_tokens, prompt_tokens > 0)
        of_tokens = self._of_tokens.get(key) or self._count_tokens(key, step)
        sampled = decodes + step.prompts
        of_sampled = self._of_sampled.get(sampled) or self._count_sampled(sampled, step)
        cache = self._cache * step.context + decodes * self._state
        for reach, size in self._cache_windows:
            cache += size * min(step.context, decodes * reach)
        pairs = self._pairs * step.prompt_pairs
        for reach, flops in self._pair_windows:
            pairs += flops * min(step.prompt_pairs, prompt_tokens * reach)
        read, products = cache / self._bandwidth, pairs / self._peak
        rates, habits = self._rates, self._habits
        if not habits.splits_contexts:
            read = max(read, self._roofline.one_by_one(step))
        attention = read / rates.cache_bandwidth + products / rates.prompt_attention
        gpu, host = of_tokens[0] + of_sampled[0] + attention, of_tokens[3] + decodes * self._row_seconds
        if habits.sends_rows:
            host += self._roofline.sent_seconds(decodes)
        if of_tokens[4]:
            gpu = with_host(gpu, of_tokens[4], 1) if habits.is_eager else gpu + of_tokens[4]
        whole = self._factor * (with_host(gpu, host, 1) if habits.overlaps else gpu + host)
        return max(whole, of_tokens[1] + of_sampled[1] + read, of_tokens[2] + of_sampled[2] + products / MOST_OF_PEAK)

    def _count_tokens(self, key: tuple[int, bool], step: StepSums) -> tuple[float, float, float, float, float]:
        """The GPU's seconds by the rates, least seconds to read and to multiply, the host's, and those of launches, of
        all that is settled by the tokens.
        """
        limits = self._roofline.of(step)._replace(**_ELSEWHERE)
        seconds, host = float(combine(limits, self._on_gpu).total), float(host_seconds(limits, self._rates))
        launches = float(launch_seconds(limits, self._rates))
        kept = self._of_tokens[key] = seconds, least_reading(limits), least_multiplying(limits), host, launches
        return kept

    def _count_sampled(self, sampled: int, step: StepSums) -> tuple[float, float, float]:
        limits = self._roofline.of(step)
        head = combine(limits, self._rates).weights - combine(limits._replace(**_ELSEWHERE), self._rates).weights
        kept = self._of_sampled[sampled] = float(head), limits.head_read, limits.head_compute / MOST_OF_PEAK
        return kept


def _by_reach(known: tuple[tuple[int | None, float], ...]) -> tuple[float, list[tuple[int, float]]]:
    """What grows with every position, and what stops at a window."""
    everything = sum(each for reach, each in known if reach is None)
    return everything, [(reach, each) for reach, each in known if reach is not None]
