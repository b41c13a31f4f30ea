"""The all-reduces of a plan: what each TP degree pays for them, how they are done and why, and what else could be."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.engine.step_sums import StepSums
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.predict import predictor
from phalanx.spec.machine import Link

_ONE_SHOT = {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}
"""Bytes up to which every rank reads all others at once, by ranks: vLLM's custom all-reduce, from memory (2026-11)."""
_TWO_SHOT = 8 << 20
"""Bytes up to which ranks reduce a part each and then gather."""
_MIB = 2**20


@dataclass(frozen=True)
class AllReduces:
    """One TP degree: of a decode step and of a prompt step, bytes of a message, microseconds of one, milliseconds a
    token or prompt, share of the step, how it is done.
    """

    tp: int
    decode_bytes: int
    decode_us: float
    decode_ms: float
    decode_share: float
    decode_algorithm: str
    prompt_bytes: int
    prompt_us: float
    prompt_ms: float
    prompt_share: float
    prompt_algorithm: str
    bound: str
    sequence_parallel: str


def all_reduces(plan: Plan) -> list[AllReduces]:
    """The winner's engine and format at every TP degree above one."""
    return [_of(plan, each) for each in plan.side_by_side if each.tp > 1]


def _of(plan: Plan, each: Candidate) -> AllReduces:
    link, spec = each.group.link(each.tp), plan.spec
    implementation = profile(each.engine.name).all_reduce
    priced = predictor(
        spec, each.group, each.tp, each.engine.name, each.workload, each.weight_format, each.fit.kv_format
    )
    prompt = max(1, round(plan.workload.mean_input))
    chunk = min(prompt, profile(each.engine.name).rules.max_batched_tokens)
    step, prompts = each.prediction.step, priced.cost(StepSums(0, 0, chunk, chunk * chunk / 2, 1))
    rows = max(1, min(each.sequences, each.workload.concurrency))
    small, large = (2 * spec.hidden * tokens for tokens in (rows, chunk))
    small_s, large_s = (all_reduce_seconds(size, each.tp, link, implementation) for size in (small, large))
    return AllReduces(
        tp=each.tp,
        decode_bytes=small,
        decode_us=small_s * 1e6,
        decode_ms=step.all_reduce * 1e3,
        decode_share=step.all_reduce / step.total,
        decode_algorithm=algorithm(small, each.tp, link),
        prompt_bytes=large,
        prompt_us=large_s * 1e6,
        prompt_ms=prompts.all_reduce * 1e3,
        prompt_share=prompts.all_reduce / prompts.total,
        prompt_algorithm=algorithm(large, each.tp, link),
        bound=max(step._fields, key=lambda part: getattr(step, part)),
        sequence_parallel=(
            f"norms over {1 / each.tp:.0%} of the tokens; as many bytes, and a launch more each: it pays for prompts "
            "of 8 MiB a message on, and not for decoding"
        ),
    )


def algorithm(size: float, ranks: int, link: Link) -> str:
    """How a message of this size is reduced on this link, and why."""
    if link.inside is not None:
        return f"{algorithm(size, link.per_box, link.inside)}, then a ring between boxes"
    if link.kind in ("nvswitch", "mesh"):
        known = min(_ONE_SHOT, key=lambda many: abs(many - ranks))
        if size <= _ONE_SHOT[known]:
            return "one-shot: latency counts, every rank reads all"
        if size <= _TWO_SHOT:
            return "two-shot: each reduces a part, then all gather"
        return "NVLS: the switch adds up" if link.kind == "nvswitch" else "ring: bandwidth counts"
    if ranks > 4 and size < _MIB:
        return "tree: latency counts, log2 of the ranks"
    return "ring: bandwidth counts, each link carries 2 (n - 1) / n of it"


def all_reduce_lines(plan: Plan) -> list[str]:
    """For a person: a line a TP degree."""
    found = all_reduces(plan)
    lines = [
        f"All-reduce, TP={each.tp}: decode {each.decode_ms:.2f} ms a token ({each.decode_share:.0%}; "
        f"{each.decode_bytes / 1024:.0f} KiB in {each.decode_us:.0f} us, {each.decode_algorithm}), prompt "
        f"{each.prompt_ms:.1f} ms ({each.prompt_share:.0%}; {each.prompt_algorithm}); most of a step: {each.bound}."
        for each in found
    ]
    if found:
        lines.append(f"Sequence parallelism: {found[-1].sequence_parallel}.")
    return lines + list(padding_lines(plan))


def padding_lines(plan: Plan) -> list[str]:
    """Where blocks of a format do not divide, how many columns would have to be padded; Phalanx deals whole blocks."""
    lines = []
    for each in plan.excluded:
        unit = plan.spec.in_format(each.weight_format).quantization
        width = plan.spec.intermediate
        if each.code != "illegal_shape" or "FFN's" not in each.found or unit is None or unit.format.unit is None:
            continue
        whole = unit.format.unit * each.tp
        padded = -(-width // whole) * whole
        lines.append(
            f"Padding: {each.weight_format} at TP={each.tp} would divide with an FFN of {padded:,} columns for "
            f"{width:,} (+{padded / width - 1:.1%} of its weights); Phalanx needs none, it deals whole blocks."
        )
    return list(dict.fromkeys(lines))
