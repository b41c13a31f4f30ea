"""Cases: what has to be simulated and priced to predict a measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from phalanx.cost.correction import Traits, traits_of
from phalanx.cost.price import Roofline
from phalanx.cost.profiles import EngineProfile, all_reduce_of, habits_of, profile
from phalanx.cost.rules import Rules
from phalanx.cost.work import RankWork, attention_parallel, count_work, pipelined
from phalanx.models import catalog
from phalanx.plan.engines import engine as engine_traits
from phalanx.plan.fit import fit, stage_of
from phalanx.plan.measurements import Measurement, MeasurementError
from phalanx.plan.speculated import drafting_part, published_acceptance
from phalanx.spec.layout import Layout
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

_UNLIMITED_CLIENTS = 512
"""InferenceX marks runs that sent everything at once so; the engine then held far fewer sequences."""
_UNLIMITED_SEQUENCES = 24
_SWEEP_BATCHED_TOKENS = 2048
"""What vLLM's times to first token in the NVIDIA sweeps (fixed lengths) show; InferenceX states 8192."""
_SGLANG_DRAFTED_SEQUENCES = 48
"""SGLang's default where tokens are guessed ahead (`--max-running-requests`)."""
_BENCH_SHARE = 0.95
"""Of free memory, what NVIDIA's overviews give the KV cache "in many cases" (`--kv_cache_free_gpu_mem_fraction`)."""
_MOST_OFFLINE = 2048
"""Sequences that TensorRT-LLM runs at once unless told otherwise."""


@dataclass(frozen=True)
class Case:
    """A measurement ready to be predicted."""

    measurement: Measurement
    profile: EngineProfile
    rules: Rules
    workload: Workload
    kv_tokens: int | None
    limits: Roofline
    traits: Traits
    drafting: Roofline | None = None

    @property
    def trace_key(self) -> tuple[Workload, Rules, int | None]:
        return self.workload, self.rules, self.kv_tokens

    @property
    def first_key(self) -> tuple[Workload, Rules, int | None]:
        """The same run with one token of output each."""
        return replace(self.workload, output_tokens=1, spread=0.0), self.rules, self.kv_tokens

    @property
    def runs_once(self) -> bool:
        """All requests at once and nothing after them: what counts is how long the whole run takes."""
        return self.measurement.kind in ("offline", "static", "burst")


def prepare(measurement: Measurement) -> Case:
    """What to simulate and price for a row. Raises a PhalanxError that names what is unknown."""
    if measurement.beyond:
        raise MeasurementError("not_expressible", f"A plan cannot say {measurement.beyond}.", "Leave the row out.")
    spec = _spec(measurement)
    machine = Machine((Gpu.named(measurement.gpu),) * (measurement.tp * measurement.stages))
    found = profile(measurement.engine, measurement.version)
    rules, workload = _rules(measurement, found, spec, machine), _workload(measurement, spec)
    work = _work(spec.without_drafts, measurement)
    stages, drafter = measurement.stages, _drafter(measurement, spec)
    between = machine.link(len(machine)) if stages > 1 else None
    limits = Roofline(
        work,
        machine.gpus[0],
        machine.link(measurement.tp),
        "flashinfer" if _fuses_all_reduces(measurement) else all_reduce_of(found, machine.gpus[0].capability),
        stages=stages,
        between=between,
        habits=habits_of(found, spec.has_states, caches_prefixes=not measurement.length_rule),
    )
    traits = traits_of(
        spec,
        found.family,
        measurement.version,
        machine.gpus[0].name,
        measurement.tp,
        measurement.ep,
        workload,
        measurement.publisher,
        measurement.attention_ranks,
    )
    return Case(
        measurement,
        found,
        rules,
        workload,
        _kv_tokens(spec, machine, measurement, min(rules.max_sequences, workload.concurrency)),
        limits,
        traits,
        replace(limits, work=_work(drafter, measurement)) if drafter else None,
    )


def _work(spec: ModelSpec, measurement: Measurement) -> RankWork:
    formats = spec.number_format, measurement.kv_dtype
    if measurement.attention_ranks > 1:
        return attention_parallel(spec, measurement.attention_ranks, *formats)
    work = pipelined(count_work(spec, measurement.tp, *formats), measurement.stages)
    return replace(work, tp=1) if measurement.is_shard else work


def _spec(measurement: Measurement) -> ModelSpec:
    spec = catalog.model(measurement.model).keeping_states_in(measurement.state_dtype)
    if measurement.speculates and not measurement.draft_model:
        if spec.head is None:
            found = f"{measurement.model} has no head that drafts, and no draft model is named"
            raise MeasurementError("no_drafter", f"{found}.", "Name one in the column draft_model.")
        spec = spec.with_drafts()
    wanted = measurement.precision
    if wanted == "fp8" and spec.number_format.startswith("fp8"):
        return spec
    if wanted == "fp8" and spec.number_format == "bf16":
        wanted = catalog.published_fp8(spec)
    return spec.in_format(wanted)


def _drafter(measurement: Measurement, spec: ModelSpec) -> ModelSpec | None:
    """What makes the drafts of a row, as a model."""
    if not measurement.speculates:
        return None
    return catalog.model(measurement.draft_model) if measurement.draft_model else drafting_part(spec)


def _workload(measurement: Measurement, spec: ModelSpec) -> Workload:
    """Of one replica, or of one batch where it has several."""
    clients = max(1, measurement.concurrency // measurement.batches)
    requests = None if measurement.requests is None else max(1, measurement.requests // measurement.batches)
    rate = None if measurement.rate is None else measurement.rate / measurement.batches
    if rate is not None and requests is None:
        requests = 10 * clients
    lengths = measurement.input_tokens, measurement.output_tokens
    workload = Workload(*lengths, clients, measurement.spread, requests, rate, drafts=measurement.drafts)
    if measurement.speculates:
        usual = measurement.acceptance
        chance = published_acceptance(spec.model_type)[0] if usual is None else usual
        workload = replace(workload, acceptance=chance)
    if _sent_all_at_once(measurement):
        everything = 10 * _UNLIMITED_SEQUENCES
        return replace(workload, concurrency=everything, requests=everything)
    if measurement.kind == "offline":
        return replace(workload, concurrency=requests or clients)
    return workload


def _sent_all_at_once(measurement: Measurement) -> bool:
    is_inferencex = measurement.engine == "vllm" and measurement.length_rule == "uniform"
    return is_inferencex and measurement.concurrency == _UNLIMITED_CLIENTS


def _rules(measurement: Measurement, found: EngineProfile, spec: ModelSpec, machine: Machine) -> Rules:
    if _sent_all_at_once(measurement):
        return replace(found.rules, max_sequences=_UNLIMITED_SEQUENCES)
    if measurement.kind == "offline":
        most = max(1, measurement.concurrency // measurement.attention_ranks)
        if measurement.engine == "trtllm" and not measurement.version.startswith("0"):
            sequences, tokens = _bench_limits(measurement, spec, machine)
            return replace(found.rules, max_sequences=min(most, sequences), max_batched_tokens=tokens)
        return replace(found.rules, max_sequences=min(most, _MOST_OFFLINE))
    if measurement.speculates and measurement.engine == "sglang":
        return replace(found.rules, max_sequences=_SGLANG_DRAFTED_SEQUENCES)
    if measurement.engine == "sglang" and measurement.length_rule == "uniform":
        return _inferencex_sglang(measurement, found.rules)
    if measurement.engine == "vllm" and measurement.length_rule == "fixed":
        return replace(found.rules, max_batched_tokens=_SWEEP_BATCHED_TOKENS)
    if measurement.engine == "trtllm" and measurement.length_rule == "uniform":
        # InferenceX gives TensorRT-LLM a step of one prompt and all decodes; of gpt-oss, 20,000 tokens.
        room = -(-(measurement.concurrency + measurement.input_tokens + 64) // 64) * 64
        if "gpt-oss" in measurement.model:
            room = 20_000
        return replace(found.rules, max_batched_tokens=room)
    return found.rules


def _inferencex_sglang(measurement: Measurement, rules: Rules) -> Rules:
    """As InferenceX launches SGLang (`benchmarks/single_node/*.sh`, read 2026-11-17): tokens of a prompt step by model,
    format and card, and on B200 a scheduler that looks for requests every 10 or 30 decodes.
    """
    is_blackwell, is_deepseek = measurement.gpu.startswith("B200"), "DeepSeek" in measurement.model
    if "GLM" in measurement.model:
        return replace(rules, max_batched_tokens=32768 if is_blackwell else 8192)
    if not is_blackwell:
        return replace(rules, max_batched_tokens=32768 if is_deepseek else 16384)
    if is_deepseek and measurement.precision == "fp8" and measurement.tp == 4:
        return replace(rules, max_batched_tokens=8192, poll_steps=10)
    tokens = 16384 if measurement.precision == "nvfp4" else 32768
    return replace(rules, max_batched_tokens=tokens, poll_steps=30 if measurement.concurrency >= 16 else 10)


def _fuses_all_reduces(measurement: Measurement) -> bool:
    """InferenceX launches SGLang on B200 with `--enable-flashinfer-allreduce-fusion`, which is off unless told."""
    is_inferencex = measurement.engine == "sglang" and measurement.length_rule == "uniform"
    return is_inferencex and measurement.gpu.startswith("B200")


def _bench_limits(measurement: Measurement, spec: ModelSpec, machine: Machine) -> tuple[int, int]:
    """Sequences at once and tokens of a step as `trtllm-bench` sets them: by what has room beside the weights on all
    cards together, and by the lengths it is given (`tensorrt_llm/bench/build/tuning.py` of 1.0, read 2026-11-17).
    """
    whole = Layout(spec, 1)
    weights = sum(spec.tensor_bytes(each, each.shape, spec.number_format) * count for each, count in spec.tensor_kinds)
    free = sum(gpu.memory_bytes for gpu in machine.gpus) - weights
    prompt, answer = measurement.input_tokens, measurement.output_tokens
    held = _BENCH_SHARE * free / (whole.kv_bytes_per_token(0, measurement.kv_dtype) * (prompt + answer))
    sequences = min(held, 4096.0) / measurement.stages
    tokens = min(sequences * (1 + prompt / answer), 32768.0)
    coarse = 32 if sequences < 256 else 128 if sequences < 1024 else 256
    grain = 256 if tokens < 4096 else 512 if tokens < 8192 else 1024
    return max(64, coarse * ceil(sequences / coarse)), max(2048, prompt, grain * ceil(tokens / grain))


def _kv_tokens(spec: ModelSpec, machine: Machine, measurement: Measurement, sequences: int) -> int | None:
    """Room of the KV cache where it is short; None where it never runs out or, by our count, nothing fits at all."""
    if (spec.latent and measurement.ep > 1) or measurement.is_shard:
        return None  # attention is data-parallel then: every rank keeps the latents of its own sequences alone
    longest = measurement.input_tokens + measurement.output_tokens
    traits = engine_traits(measurement.engine)
    if measurement.engine == "trtllm" and measurement.kind == "offline":
        traits = replace(traits, share=_BENCH_SHARE)
    fitted = fit(
        stage_of(spec, measurement.stages),
        machine,
        measurement.tp,
        traits,
        weight_format=spec.number_format,
        kv_format=measurement.kv_dtype,
        context=longest,
        sequences=sequences,
        attention_ranks=measurement.attention_ranks,
    )
    room = fitted.kv_tokens // measurement.stages
    needed = sequences * (longest + 16)
    return None if room >= needed or room < 2 * longest else room
