"""The launch command of each engine, in the flags of its current command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.plan.engines import EngineTraits, static_reserve
from phalanx.spec.formats import PLAIN
from phalanx.spec.machine import Machine
from phalanx.spec.step_memory import SYSTEM_SHARE
from phalanx.version import __version__

FIRST_PORT = 8000
ADMIN_PORT = 9000
TRTLLM_OPTIONS = "trtllm.yaml"
_VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES", "Intel": "HABANA_VISIBLE_MODULES"}
_IMAGES = {
    ("NVIDIA", "phalanx"): f"phalanx:{__version__}",
    ("NVIDIA", "vllm"): "vllm/vllm-openai:v0.24.0",
    ("NVIDIA", "sglang"): "lmsysorg/sglang:v0.5.9",
    ("NVIDIA", "trtllm"): "nvcr.io/nvidia/tensorrt-llm/release:1.2.0",
    ("AMD", "vllm"): "vllm/vllm-openai-rocm:v0.24.0",
    ("AMD", "sglang"): "lmsysorg/sglang:v0.5.9-rocm700-mi30x",
    ("Intel", "vllm"): "opea/vllm-gaudi:latest",
}
_SAFE_MODEL = re.compile(r"[\w./~][\w./~+ -]*")


@dataclass(frozen=True)
class Launch:
    """What to start: `replicas` engines of `tp` GPUs, times `stages` of a pipeline; with `attention_ranks` each of them
    has sequences of its own, up to `max_num_seqs`; `prompt_replicas` of the replicas compute prompts alone. `prepare`:
    the command that first writes the checkpoint, `note`: what to do where none is known, `flags`: what else the engine
    is told. The model's own head makes up to `drafts` of tokens. With `narrow_states` recurrent states are in bf16.
    """

    model: str
    engine: EngineTraits
    machine: Machine
    tp: int
    replicas: int
    weight_format: str
    kv_format: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    expert_parallel: bool = False
    stages: int = 1
    attention_ranks: int = 1
    prompt_replicas: int = 0
    drafts: int = 0
    narrow_states: bool = False
    prepare: tuple[str, ...] = ()
    note: str = ""
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _SAFE_MODEL.fullmatch(self.model):
            raise ConfigError(
                "bad_model_name",
                f"A recipe cannot be written for the model name {self.model!r}.",
                "Use letters, digits, dots, dashes and slashes, such as meta-llama/Llama-3.3-70B-Instruct.",
            )

    @property
    def one_gpu_machines(self) -> bool:
        """Unified memory is a whole computer around one GPU."""
        return self.machine.smallest.unified_memory

    @property
    def spans_machines(self) -> bool:
        if self.one_gpu_machines:
            return self.tp * self.stages > 1
        return bool(self.machine.per_box) and self.tp * self.stages > self.machine.per_box

    @property
    def nodes(self) -> int:
        """Machines of one replica."""
        return -(-self.gpus // self.per_node)

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tp * self.stages

    @property
    def per_node(self) -> int:
        """GPUs of a machine."""
        return 1 if self.one_gpu_machines else self.machine.per_box or len(self.machine)

    @property
    def image(self) -> str:
        """The container that has this engine."""
        return _IMAGES[self.vendor, self.engine.name]

    @property
    def vendor(self) -> str:
        return self.machine.smallest.vendor

    @property
    def visible(self) -> str:
        """The variable that says which cards a process sees."""
        return _VISIBLE[self.vendor]

    def devices(self, replica: int) -> list[str]:
        """GPUs of a replica, by their number on the machine it runs on."""
        if self.one_gpu_machines:
            return ["0"]
        return [str(device) for device in range(replica * self.gpus, (replica + 1) * self.gpus)]

    @property
    def utilization(self) -> float:
        """vLLM's share of memory: what unified memory can spare, or what the engine takes."""
        return 1 - SYSTEM_SHARE if self.one_gpu_machines else self.engine.share

    @property
    def static_fraction(self) -> float:
        """SGLang's share for weights and KV."""
        memory = self.machine.smallest.memory_bytes * (1 - SYSTEM_SHARE if self.one_gpu_machines else 1)
        kept = static_reserve(self.tp, self.max_num_batched_tokens)
        return round((memory - kept) / self.machine.smallest.memory_bytes, 3)


def command(launch: Launch, host: str = "127.0.0.1", port: int = FIRST_PORT, extra: tuple[str, ...] = ()) -> list[str]:
    """One replica's command, word by word."""
    flags = {"phalanx": _phalanx, "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[launch.engine.name]
    return [*flags(launch), *extra, "--host", host, "--port", str(port)]


def _phalanx(launch: Launch) -> list[str]:
    words = ["phalanx", "serve", launch.model, "--tp", str(launch.tp)]
    if launch.weight_format in PLAIN:
        words += ["--dtype", launch.weight_format]
    if launch.kv_format == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if launch.narrow_states:
        words += ["--state-dtype", "bf16"]
    if launch.drafts:
        words += ["--speculate", "mtp", "--speculate-tokens", str(launch.drafts)]
    return [
        *words,
        *("--max-model-len", str(launch.max_model_len)),
        *("--max-num-seqs", str(max(launch.max_num_seqs, 1 + launch.drafts))),
        *("--max-num-batched-tokens", str(launch.max_num_batched_tokens)),
    ]


def _vllm(launch: Launch) -> list[str]:
    words = ["vllm", "serve", launch.model, "--tensor-parallel-size", str(launch.tp // launch.attention_ranks)]
    if launch.attention_ranks > 1:
        words += ["--data-parallel-size", str(launch.attention_ranks)]
    if launch.stages > 1:
        words += ["--pipeline-parallel-size", str(launch.stages)]
    if launch.expert_parallel and not launch.one_gpu_machines:
        words += ["--enable-expert-parallel"]
    if launch.kv_format == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if launch.narrow_states:
        words += ["--mamba-ssm-cache-dtype", "bfloat16"]
    if launch.drafts:
        words += ["--speculative-config", f'{{"method": "mtp", "num_speculative_tokens": {launch.drafts}}}']
    return [
        *words,
        *("--max-model-len", str(launch.max_model_len)),
        *("--max-num-seqs", str(launch.max_num_seqs)),
        *("--max-num-batched-tokens", str(launch.max_num_batched_tokens)),
        *("--gpu-memory-utilization", f"{launch.utilization:g}"),
        *launch.flags,
    ]


def _sglang(launch: Launch) -> list[str]:
    words = ["python3", "-m", "sglang.launch_server", "--model-path", launch.model, "--tp-size", str(launch.tp)]
    if launch.stages > 1:
        words += ["--pp-size", str(launch.stages)]
    if launch.expert_parallel:
        words += ["--ep-size", str(launch.tp)]
    if launch.attention_ranks > 1:
        words += ["--dp-size", str(launch.attention_ranks), "--enable-dp-attention"]
    if launch.kv_format == "fp8":
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if launch.narrow_states:
        words += ["--mamba-ssm-dtype", "bfloat16"]
    if launch.drafts:
        words += ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(launch.drafts)]
        words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(launch.drafts + 1)]
    return [
        *words,
        *("--context-length", str(launch.max_model_len)),
        *("--max-running-requests", str(launch.max_num_seqs * launch.attention_ranks)),
        *("--chunked-prefill-size", str(launch.max_num_batched_tokens * launch.attention_ranks)),
        *("--mem-fraction-static", f"{launch.static_fraction:g}"),
    ]


def _trtllm(launch: Launch) -> list[str]:
    words = ["trtllm-serve", launch.model, "--backend", "pytorch", "--tp_size", str(launch.tp)]
    if launch.stages > 1:
        words += ["--pp_size", str(launch.stages)]
    if launch.expert_parallel:
        words += ["--ep_size", str(launch.tp)]
    return [
        *words,
        *("--max_seq_len", str(launch.max_model_len)),
        *("--max_batch_size", str(launch.max_num_seqs)),
        *("--max_num_tokens", str(launch.max_num_batched_tokens)),
        *("--extra_llm_api_options", TRTLLM_OPTIONS),
    ]


def trtllm_options(launch: Launch) -> str:
    """What TensorRT-LLM reads from a file: the KV cache and chunked prefill."""
    dtype = "fp8" if launch.kv_format == "fp8" else "auto"
    return (
        ("enable_attention_dp: true\n" if launch.attention_ranks > 1 else "") + "enable_chunked_prefill: true\n"
        "kv_cache_config:\n"
        f"  free_gpu_memory_fraction: {launch.engine.share:g}\n"
        f"  dtype: {dtype}\n"
        + ("  mamba_ssm_cache_dtype: bfloat16\n" if launch.narrow_states else "")
        + (
            f"speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: {launch.drafts}\n"
            if launch.drafts
            else ""
        )
    )
