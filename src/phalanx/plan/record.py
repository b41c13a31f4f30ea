"""A plan as a record for programs, and what to start so that it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx.models import catalog
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.collectives import all_reduces
from phalanx.plan.engines import GIB
from phalanx.plan.explain import advice, day, explain, gpus_needed, verdict
from phalanx.plan.fit import Fit
from phalanx.plan.measured import calibration_dict
from phalanx.plan.predict import Interval, percentile
from phalanx.plan.recipes import Launch, command
from phalanx.plan.recipes.spark_flags import spark_flags
from phalanx.plan.scaling import scaling_curve
from phalanx.plan.support import loads_checkpoint
from phalanx.spec.formats import FORMATS, FP8_FORMATS
from phalanx.spec.model import ModelSpec

SHARES = (0.5, 0.95, 0.99)
"""Percentiles that are told."""
_CONTEXT_MARGIN = 0.95
"""Of the room that was counted: engines refuse to start when theirs comes out smaller than one request."""


def launch_of(plan: Plan, candidate: Candidate) -> Launch:
    """What to start so that it does what was planned: the checkpoint of the planned format, or how to come by it."""
    wanted, ours = candidate.weight_format, candidate.engine.name == "phalanx"
    known = catalog.find(plan.model)
    either = ("fp8", "fp8-channel") if wanted in FP8_FORMATS and not ours else (wanted,)
    loads = partial(loads_checkpoint, candidate.engine.name, plan.machine.smallest)
    ready = known[0].checkpoint(*either, loads=loads) if known else None
    if known and "/" in plan.model and (known[1] or known[0].spec.number_format) in either:
        ready = plan.model
    origin = known[0].ids[0] if known else plan.model
    model, note = ready or origin, ""
    prepare: tuple[str, ...] = ()
    if candidate.expert_parallel and not ours and plan.machine.smallest.unified_memory:
        note = (
            f"FP8 blocks do not divide by TP={candidate.tp}: vLLM would need --enable-expert-parallel, which fails on "
            "DGX Spark. Use a checkpoint in AWQ or NVFP4, or another TP."
        )
    if ready is None and plan.spec.number_format != wanted and FORMATS[wanted].bits < 16:
        model = f"./{origin.rstrip('/').rpartition('/')[2]}-{wanted.upper()}"
        if wanted in FP8_FORMATS and candidate.engine.name != "trtllm":
            kind = "fp8-channel" if wanted == "fp8-channel" else "fp8-block"
            prepare = ("phalanx", "quantize", origin, "--output", model, "--format", kind)
        else:
            note = f"No checkpoint of {origin} in {wanted} is known here: name yours in place of {model}."
    on_spark = candidate.engine.name == "vllm" and plan.machine.smallest.unified_memory
    flags = spark_flags(plan.spec, model) if on_spark else ()
    return Launch(
        model=model,
        engine=candidate.engine,
        machine=plan.machine,
        tp=candidate.tp,
        replicas=candidate.replicas,
        stages=candidate.stages,
        attention_ranks=candidate.attention_ranks,
        prompt_replicas=candidate.prompt_replicas,
        weight_format=wanted,
        kv_format=candidate.fit.kv_format,
        narrow_states=plan.spec.state_format == "bf16",
        max_model_len=served_context(plan, candidate),
        max_num_seqs=candidate.sequences,
        max_num_batched_tokens=candidate.engine.batched_tokens(plan.machine.smallest),
        expert_parallel=candidate.expert_parallel,
        drafts=plan.workload.drafts if plan.spec.drafts else 0,
        prepare=prepare,
        note=note,
        flags=flags,
    )


def served_context(plan: Plan, candidate: Candidate) -> int:
    """The longest request that will be served: what was asked for, or what the memory gives up to the model's end."""
    if plan.asks_context:
        return plan.context
    longest = candidate.fit.longest_context
    if longest >= plan.spec.max_positions:
        return plan.spec.max_positions
    return max(plan.context, int(_CONTEXT_MARGIN * longest) // 1024 * 1024)


def to_dict(plan: Plan, files: dict[str, str] | None = None) -> dict[str, Any]:
    """Everything that is printed, for programs. Times are milliseconds."""
    best = plan.best
    return {
        "model": _model_dict(plan.model, plan.spec),
        "machine": plan.machine.name,
        "calibration": calibration_dict(plan),
        "workload": _workload_dict(plan),
        "slo_ms": {"ttft": None, "tpot": None} | {name: 1e3 * goal for name, goal in plan.slo.goals.items()},
        "meets_slo": bool(plan.feasible),
        "explanation": explain(plan),
        "advice": [*advice(plan), *([] if best else gpus_needed(plan))],
        "best": candidate_dict(plan, best) if best else None,
        "fit": _fit_dict(best.fit) if best else None,
        "side_by_side": [
            candidate_dict(plan, each) | {"scaling_efficiency": plan.scaling(each)} for each in plan.side_by_side
        ],
        "candidates": [candidate_dict(plan, each) for each in plan.candidates],
        "excluded": [vars(each) for each in plan.excluded],
        "cost": _cost_dict(best) if best else None,
        "scaling": [vars(each) for each in scaling_curve(plan)],
        "all_reduces": [vars(each) for each in all_reduces(plan)],
        "power_w": _power_dict(plan),
        "verdict": verdict(plan),
        "day": day(plan) if best else None,
        "machines_needed": plan.machines_needed,
        "context": served_context(plan, best) if best else None,
        "prepare": list(launch_of(plan, best).prepare) if best else [],
        "command": command(launch_of(plan, best)) if best else None,
        "note": launch_of(plan, best).note if best else "",
        "recipe": files,
    }


def _tails(name: str, seen: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{100 * share:g}_ms": percentile(seen, share) * 1e3 for share in SHARES}


def _model_dict(name: str, spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": name,
        "family": spec.model_type,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "layers": len(spec.layers),
        "caches": dict(Counter(cache.kind for cache in spec.caches)),
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "state_bytes_per_sequence": sum(cache.state_bytes for cache in spec.caches),
        "max_positions": spec.max_positions,
        "checkpoint_format": spec.number_format,
        "served_by_phalanx": spec.refusal is None,
    }


def _workload_dict(plan: Plan) -> dict[str, Any]:
    workload = plan.workload
    told = {
        name: getattr(workload, name)
        for name in ("input_tokens", "output_tokens", "spread", "concurrency", "rate", "acceptance")
    }
    shared = {name: getattr(workload, name) for name in ("shared_prefix", "agents")}
    counted = {"trace_requests": len(workload.trace) or None, "requests": workload.total_requests}
    return told | shared | counted | {"context": plan.context}


def _interval_dict(interval: Interval, scale: float) -> dict[str, float]:
    return {"mid": interval.mid * scale, "low": interval.low * scale, "high": interval.high * scale}


def candidate_dict(plan: Plan, each: Candidate) -> dict[str, Any]:
    tight, prediction = each.fit.tightest, each.prediction
    return {
        "engine": each.engine.name,
        "tp": each.tp,
        "replicas": each.replicas,
        "pipeline_stages": each.stages,
        "attention_ranks": each.attention_ranks,
        "prompt_replicas": each.prompt_replicas,
        "gpus": each.gpus,
        "gpus_paid": len(each.paid),
        "expert_parallel": each.expert_parallel,
        "weight_format": each.weight_format,
        "kv_format": each.fit.kv_format,
        "meets_slo": plan.meets(each),
        "ttft_ms": _interval_dict(prediction.ttft, 1e3),
        "tpot_ms": _interval_dict(prediction.tpot, 1e3),
        **_tails("ttft", prediction.requests_ttft),
        **_tails("tpot", prediction.requests_tpot),
        "is_held": each.is_held,
        "capacity_requests_per_s": each.capacity,
        "requests_per_s": each.requests_per_s,
        "tokens_per_day": each.tokens_per_day,
        "max_num_seqs": each.sequences,
        "tokens_per_s": _interval_dict(prediction.throughput, each.copies),
        "tokens_per_s_per_gpu": each.per_gpu,
        "usd_per_million_tokens": each.usd_per_million,
        "weights_gib_per_gpu": tight.weight_bytes / GIB,
        "kv_gib_per_gpu": tight.kv_bytes / GIB,
        "kv_tokens": each.fit.kv_tokens,
        "max_sequences": each.fit.max_sequences,
        "longest_context": each.fit.longest_context,
        "all_reduce_share": prediction.all_reduce_share,
        "preemptions": prediction.preemptions,
        "cached_share": prediction.cached_share,
    }


def _fit_dict(fit: Fit) -> dict[str, Any]:
    return {
        "ranks": [
            {
                "rank": rank.rank,
                "gpu": rank.gpu.name,
                "lines": [vars(line) for line in rank.lines],
                "weight_bytes": rank.weight_bytes,
                "kv_bytes": rank.kv_bytes,
            }
            for rank in fit.ranks
        ],
        "tightest_rank": fit.tightest.rank,
        "kv_bytes_per_token": fit.kv_bytes_per_token,
        "kv_bytes_per_request": dict(fit.request_bytes),
        "kv_tokens": fit.kv_tokens,
        "notes": list(fit.notes),
    }


def _cost_dict(best: Candidate) -> dict[str, Any]:
    cost = best.cost
    return {
        "usd_per_hour": {"rent": cost.rent, "reserved": cost.reserved, "owned": cost.owned},
        "purchase_usd": cost.purchase,
        "break_even_utilisation": cost.break_even,
        "break_even_hours_a_day": cost.break_even_hours,
        "months_to_pay": cost.months_to_pay,
        "usd_per_month": cost.monthly(),
        "usd_per_million_tokens": best.usd_per_million,
        "basis": cost.basis,
        "prices_as_of": list(cost.dates),
    }


def _power_dict(plan: Plan) -> dict[str, Any] | None:
    power = plan.power
    if power is None:
        return None
    return {
        "gpus": power.gpu_w,
        "gpus_sustained": power.gpu_sustained_w,
        "sustained": power.server_sustained_w,
        "limit": power.server_w,
        "transient": power.server_transient_w,
        "facility": power.facility_w,
        "volts": power.volts,
        "amperes": power.amperes,
        "rack_units": power.rack_units,
        "cooling": power.cooling,
        "hint": power.hint,
    }
