"""A deployment on this machine: does it load, does it fit, and is it a good idea."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.doctor.checks.cpu import cpu_bytes, fits_cpu
from phalanx.doctor.checks.links import islands_of, pairs_of, takes_bridges
from phalanx.doctor.checks.products import gib, is_spark, machine_of, product, whose
from phalanx.doctor.checks.software import version
from phalanx.doctor.checks.toll import toll_of
from phalanx.doctor.facts import Facts, GpuFacts
from phalanx.doctor.finding import Finding
from phalanx.plan.choose import choose
from phalanx.plan.engines import ENGINES, PHALANX_CAPABILITY, EngineTraits
from phalanx.plan.predict import predict
from phalanx.plan.shapes import shape
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

FORMAT_CAPABILITY = {"fp8": (8, 9), "fp8-channel": (8, 9), "nvfp4": (10, 0)}
"""The first compute capability whose tensor cores multiply the format."""
_SINGLE_STREAMS = 8
_ADVISED_GAIN = 1.05
_FP8_GAIN = 1.1


@dataclass(frozen=True)
class Deployment:
    """What is to be served. `planned` is the machine the plan was made for, `elsewhere` GPUs of other machines."""

    tp: int = 1
    model: str = ""
    spec: ModelSpec | None = None
    number_format: str = ""
    concurrency: int = 32
    planned: Machine | None = None
    elsewhere: int = 0

    @property
    def weights(self) -> str:
        """The format of the weights: as asked for, or the checkpoint's own."""
        return self.number_format or (self.spec.number_format if self.spec else "bf16")

    @cached_property
    def workload(self) -> Workload:
        return Workload(concurrency=self.concurrency)

    def engine(self) -> EngineTraits:
        """Phalanx, or where it does not load this model, the first engine that does."""
        assert self.spec is not None
        loading = [engine for engine in ENGINES.values() if engine.refusal(self.spec, self.weights, "bf16") is None]
        return loading[0] if loading else ENGINES["phalanx"]


def gpus_planned(facts: Facts, deployment: Deployment) -> Finding | None:
    """The cards that are here against those that were planned for."""
    if deployment.planned is None:
        return None
    wanted = Counter(gpu.name for gpu in deployment.planned.gpus)
    found = Counter(known.name if (known := product(gpu)) else gpu.name for gpu in facts.gpus)
    spread = is_spark(facts) or deployment.elsewhere > 0
    here = ", ".join(f"{count} x {name}" for name, count in found.items()) or "no GPU"
    fits = (set(wanted) == set(found)) if spread else wanted == found
    if fits:
        return Finding("ok", "gpus_planned", "GPUs of the plan", here)
    if wanted <= found:
        return Finding(
            "note", "gpus_planned", "More GPUs than planned", f"planned {deployment.planned.name}, found {here}"
        )
    return Finding(
        "error",
        "gpus_planned",
        "Not the GPUs that were planned for",
        f"planned {deployment.planned.name}, found {here}",
        "The plan's memory, speed and TP degree are for other cards.",
        "Missing cards: lspci | grep -i nvidia, dmesg (Xid 79), the container's --gpus. Or plan anew for what is here.",
    )


def gpu_count(facts: Facts, deployment: Deployment) -> Finding | None:
    """A rank needs a GPU of its own, where there are GPUs at all."""
    there = len(facts.gpus) + deployment.elsewhere
    if not facts.gpus or deployment.tp <= there:
        return None
    if is_spark(facts):
        return Finding(
            "note",
            "gpu_count",
            "Ranks on other machines are needed",
            f"TP={deployment.tp}, and one GPU here",
            "Their facts are not judged here.",
            "phalanx doctor --record on each, then phalanx doctor --facts A.json --facts B.json.",
        )
    return Finding(
        "error",
        "gpu_count",
        "Fewer GPUs than ranks",
        f"TP={deployment.tp}, {there} GPUs",
        "Every rank needs a GPU of its own.",
        f"Use TP <= {there}, or give the facts of the other machines too (--facts).",
    )


def is_too_old(gpu: GpuFacts) -> bool:
    """Whether Phalanx has no kernels for it. A card that does not tell its capability is given the chance."""
    has = version(gpu.capability)
    return bool(has) and has < PHALANX_CAPABILITY


def kernels(facts: Facts, deployment: Deployment) -> Finding | None:
    """What Phalanx's own kernels run on."""
    old = [gpu for gpu in facts.gpus if is_too_old(gpu)]
    if not old:
        return None
    return Finding(
        "error",
        "kernels",
        "Phalanx has no kernels for this card",
        f"{whose(old)}: {old[0].name}, compute capability {old[0].capability}",
        "Its GPU kernels are built for 8.0 (Ampere) and newer.",
        "Use vLLM or SGLang here (phalanx plan MODEL --engine vllm --recipe shell), or CUDA_VISIBLE_DEVICES= to serve "
        "on the processor.",
    )


def number_format(facts: Facts, deployment: Deployment) -> Finding | None:
    """Formats that the tensor cores of a card do not multiply: no faster than BF16."""
    needed = FORMAT_CAPABILITY.get(deployment.weights)
    old = [gpu for gpu in facts.gpus if needed and (has := version(gpu.capability)) and has < needed]
    if needed is None or not old:
        return None
    return Finding(
        "warning",
        "number_format",
        f"{deployment.weights} is no faster than bf16 here",
        f"{whose(old)}: compute capability {old[0].capability}; {deployment.weights} needs {needed[0]}.{needed[1]}",
        "The tensor cores cannot multiply it: engines that load it widen the weights first. It saves memory, not time.",
        "Keep it for the memory it saves, or use bf16; AWQ or GPTQ save more where decoding is all that counts.",
    )


def shapes(facts: Facts, deployment: Deployment) -> Iterator[Finding]:
    """Which engines load the model at this TP degree, and which refuse."""
    if deployment.spec is None or deployment.tp == 1:
        return
    spec = deployment.spec.in_format(deployment.weights)
    own = shape(spec, deployment.tp, ENGINES["phalanx"])
    what = f"{deployment.model} in {deployment.weights} at TP={deployment.tp}"
    if not own.is_legal:
        yield Finding("error", "shape", "The model cannot be dealt to so many ranks", own.problems[0], what, own.fix)
        return
    refusing = {
        engine.title: judged
        for engine in ENGINES.values()
        if engine.name != "phalanx" and not (judged := shape(spec, deployment.tp, engine)).is_legal
    }
    if not refusing:
        yield Finding("ok", "shape", "Shapes", f"{what} can be dealt in every engine")
        return
    first = next(iter(refusing.values()))
    loads = deployment.engine().name == "phalanx"
    yield Finding(
        "note",
        "shape",
        "Other engines refuse this TP degree",
        f"{', '.join(refusing)}: {'; '.join(first.problems)}",
        "Shares that cut a block or a head cannot be loaded there. "
        + ("Phalanx deals whole blocks, unevenly where it must, and loads it." if loads else ""),
        f"There: {first.fix}",
    )


def fits(facts: Facts, deployment: Deployment) -> Iterator[Finding]:
    """Memory, counted by the planner on the cards that were found."""
    machine, spec = _group(facts, deployment), deployment.spec
    if spec is None or machine is None:
        return
    engine = deployment.engine()
    refused = ENGINES["phalanx"].refusal(spec, deployment.weights, "bf16")
    if refused is not None:
        others = ", ".join(
            each.title for each in ENGINES.values() if each.refusal(spec, deployment.weights, "bf16") is None
        )
        yield Finding(
            "warning",
            "served",
            "Phalanx does not serve this model",
            refused,
            "",
            f"phalanx plan makes recipes for {others}." if others else "No engine known here loads it.",
        )
    plan = choose(
        spec,
        deployment.model,
        machine,
        deployment.workload,
        engines=[engine],
        formats=[deployment.weights],
        tps=[deployment.tp],
    )
    best = plan.best
    if best is None:
        reason = next((each for each in plan.excluded if each.code != "not_loadable"), None)
        if reason is not None and reason.code != "illegal_shape":
            yield Finding("error", "fit", "The model does not fit", reason.found, "", reason.fix)
        return
    tight = best.fit.tightest
    yield Finding(
        "ok",
        "fit",
        "Memory",
        f"{deployment.model} in {deployment.weights} at TP={deployment.tp} takes {gib(tight.weight_bytes)} of weights "
        f"a GPU "
        f"and leaves room for {best.fit.kv_tokens:,} tokens ({best.engine.title})",
        " ".join(best.fit.notes),
    )


def _group(facts: Facts, deployment: Deployment) -> Machine | None:
    """The GPUs of one replica; those on other machines are taken to be like the ones here."""
    machine, tp = machine_of(facts), deployment.tp
    if machine is None or (tp > len(machine) + deployment.elsewhere and not is_spark(facts)):
        return None
    return Machine((machine.gpus * tp)[:tp]) if tp > len(machine) else machine.take(tp)


def tp_links(facts: Facts, deployment: Deployment) -> Finding | None:
    """Whether the first ranks' GPUs are the ones that NVLink joins."""
    pairs, tp, spec = pairs_of(facts), deployment.tp, deployment.spec
    order = sorted(gpu.index for gpu in facts.gpus)
    group = order[:tp]
    inside = [pairs.get((a, b)) for a in group for b in group if a < b]
    if tp < 2 or len(group) < tp or any(path is None for path in inside):
        return None
    if all(path is not None and path.kind == "nvlink" for path in inside):
        return Finding("ok", "tp_links", "Links of the ranks", f"NVLink between all {tp}")
    island = next((island for island in islands_of(facts) if len(island) >= tp), None)
    if island is not None and len(island) < len(order):
        chosen = ",".join(map(str, [*island, *(index for index in order if index not in island)]))
        return Finding(
            "warning",
            "tp_links",
            "The first ranks are not joined by NVLink",
            f"TP={tp} takes GPUs {', '.join(map(str, group))}; NVLink joins {', '.join(map(str, island))}",
            "",
            f"CUDA_VISIBLE_DEVICES={chosen}",
        )
    if spec is None:
        return None
    return Finding(
        "warning" if takes_bridges(facts) else "note",
        "tp_links",
        "The ranks talk over PCIe",
        toll_of(facts, deployment.model, spec, tp, deployment.concurrency),
        "They are paid at every step, before the next token can be sampled.",
        f"Compare with fewer ranks a replica: phalanx plan {deployment.model} --machine ... --tp 1,2,{tp}",
    )


def single_stream(facts: Facts, deployment: Deployment) -> Finding | None:
    """Four ranks and more for a handful of requests, against two groups of half as many: with the same requests, and
    with twice as many, which is what two groups could serve beside each other.
    """
    machine, spec, tp = machine_of(facts), deployment.spec, deployment.tp
    if spec is None or machine is None or tp < 4 or tp % 2 or tp > len(machine):
        return None
    if deployment.concurrency > _SINGLE_STREAMS:
        return None
    twice = replace(deployment.workload, concurrency=2 * deployment.concurrency)
    whole, halves, full = (
        choose(
            spec,
            deployment.model,
            machine.take(tp),
            load,
            engines=[deployment.engine()],
            formats=[deployment.weights],
            tps=[ranks],
        ).best
        for ranks, load in ((tp, deployment.workload), (tp // 2, deployment.workload), (tp // 2, twice))
    )
    if whole is None or halves is None or full is None:
        return None
    slow, fast = (each.prediction.tpot.mid * 1e3 for each in (halves, whole))
    shares = (
        f"All-reduces take {whole.prediction.all_reduce_share:.0%} of a step at TP={tp}, "
        f"{halves.prediction.all_reduce_share:.0%} at TP={tp // 2}"
    )
    same = f"{deployment.concurrency} at once: TP={tp} {fast:.1f} ms a token, 2 x TP={tp // 2} {slow:.1f}"
    if halves.throughput >= _ADVISED_GAIN * whole.throughput:
        return Finding(
            "warning",
            "single_stream",
            f"Few requests do not fill TP={tp}",
            f"{same}; {whole.throughput:.0f} and {halves.throughput:.0f} tokens/s",
            f"{shares}: more ranks add waiting, not speed.",
            f"Run two replicas of TP={tp // 2}.",
        )
    if full.throughput < _ADVISED_GAIN * whole.throughput:
        return None
    return Finding(
        "note",
        "single_stream",
        f"TP={tp} is for the time per token",
        f"{same}. With {twice.concurrency} at once 2 x TP={tp // 2} make {full.throughput:.0f} tokens/s, TP={tp} makes "
        f"{whole.throughput:.0f} with {deployment.concurrency}",
        f"{shares}.",
        f"Keep TP={tp} where a single answer must be fast; two replicas of TP={tp // 2} where more come at once.",
    )


def fp8_gain(facts: Facts, deployment: Deployment) -> Finding | None:
    """FP8 against BF16 at this load, as the planner has it."""
    machine, spec, tp = machine_of(facts), deployment.spec, deployment.tp
    if spec is None or machine is None or tp > len(machine) or not deployment.weights.startswith("fp8"):
        return None
    own = shape(spec.in_format(deployment.weights), tp, ENGINES["phalanx"])
    if number_format(facts, deployment) is not None or not own.is_legal:
        return None
    engine = deployment.engine().name
    fp8, bf16 = (
        predict(spec, machine, tp, engine, deployment.workload, weights=each) for each in (deployment.weights, "bf16")
    )
    gain = bf16.tpot.mid / fp8.tpot.mid
    found = (
        f"{fp8.tpot.mid * 1e3:.1f} ms a token in {deployment.weights}, {bf16.tpot.mid * 1e3:.1f} ms in bf16, "
        f"{deployment.concurrency} requests at once"
    )
    if gain >= _FP8_GAIN:
        return Finding("ok", "fp8_gain", "FP8 against bf16", f"{gain:.1f} x: {found}")
    return Finding(
        "note",
        "fp8_gain",
        "FP8 is hardly faster than bf16 at this load",
        found,
        "At few requests all-reduces and overheads fill the step, and quantising activations adds some.",
        "Keep it for the memory: more KV cache, or fewer GPUs a replica, is where it pays.",
    )


def disk_room(facts: Facts, deployment: Deployment) -> Finding | None:
    """Room for the weights, unless they are there already."""
    disk = facts.system.disk
    if disk is None or deployment.spec is None:
        return None
    needed = deployment.spec.weight_bytes(deployment.weights)
    found = f"{deployment.model} takes {gib(needed)} in {deployment.weights}; {gib(disk.free_bytes)} free at "
    f"{disk.path}"
    if disk.free_bytes < needed:
        return Finding(
            "warning",
            "disk_room",
            "No room to download the weights",
            found,
            "A download that fills the disk fails at its end. Weights that lie there already need no room.",
            "Free some, or set HF_HOME to a larger disk.",
        )
    return Finding("ok", "disk_room", "Disk for the weights", found)


def cpu_memory(facts: Facts, deployment: Deployment) -> Finding | None:
    """Without GPUs the weights lie in the machine's memory, as float32."""
    available, spec = facts.system.available_bytes, deployment.spec
    if facts.gpus or spec is None or not available:
        return None
    found = f"{deployment.model} needs {gib(cpu_bytes(spec))} on a processor; {gib(available)} available"
    if fits_cpu(spec, available):
        return Finding("ok", "cpu_memory", "Memory", found)
    return Finding(
        "error",
        "cpu_memory",
        "The model does not fit into memory",
        found,
        "Weights are float32 there, four bytes each; a quarter of what is available goes to keys and values.",
        "Use a smaller model, a machine with more memory, or a GPU: phalanx plan says which.",
    )
