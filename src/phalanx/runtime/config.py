"""EngineConfig: everything an engine is started with, in one serialisable record."""

from __future__ import annotations

import msgspec

from phalanx.engine import defaults
from phalanx.errors import ConfigError
from phalanx.spec.draft_head import MOST_DRAFTS
from phalanx.spec.formats import DTYPE_NAMES, PLAIN, STATE_DTYPES

KV_CACHE_DTYPES = ("auto", "fp8")
LOAD_FORMATS = ("auto", "dummy")
EXECUTORS = ("local", "ray")
WARM_UPS = ("full", "quick", "off")
SPECULATIONS = ("off", "auto", "ngram", "mtp")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine. None means: chosen from the model and the machine.

    `model` is a folder, a GGUF file or a Hugging Face id; None is the default model. `kv_cache_memory` is bytes a rank.
    `gpu_memory_utilization` is the most of a GPU's memory that the engine takes (on CPUs: of the machine's); None is
    what is safe: all but a hundredth of a card, all but 15 % of memory that a GPU shares with its system.
    `dtype` may go by torch's and vLLM's names too, or be a torch dtype: it is kept as "fp32", "bf16", "fp16" or "auto".
    `kv_cache_dtype` is "fp8" for keys and values in e4m3, or "auto" for the dtype that the model is computed in.
    `state_dtype` is "bf16" for recurrent states of half the size, or "fp32", which "auto" is. Where states are rounded
    depends on drafts and on how prompts are cut: with "bf16", answers may differ with them.

    With `executor="ray"` the ranks run on the machines of a Ray cluster: `ranks_per_node` on each (default: one a GPU,
    or one a machine on CPUs), talking over `interface` (default: the one Ray uses). `node_wait_s` is how long to wait
    for machines that are missing.

    `warm_up` says what is made ready before the first request: "full" builds all kernels and captures all CUDA graphs,
    "quick" all kernels and the graphs that can stand in for the others, which follow when the engine idles; with "off"
    each is made when it is first needed, as suits a script.

    `speculate` guesses tokens ahead and computes them together with the next one, which changes no answer: "ngram"
    looks for what followed the last tokens in prompt and answer before, "mtp" asks the checkpoint's own head for it,
    "auto" that head where there is one and n-grams otherwise. Anything else names a small model with the same tokens
    that drafts. There are at most `speculate_tokens` guesses a request and step (default: 8, or as many as fit a batch
    of one request); fewer where they cost more than they bring.

    With `canary` ranks compare digests of every step before it is answered with, and read their weights once in a while
    to see whether they are still what was loaded.

    With `invariant` an answer has the same bits at every TP that the model's sizes allow, whoever shares its batch.

    `lora` are adapters by name, each a folder in PEFT's form. `lora_memory` is bytes a rank for these and for those
    that are loaded later: what these take, if that is more.

    `share_gpus` lets ranks share GPUs where there are fewer than ranks. For tests: they take turns, so it is slow.
    """

    model: str | None = None
    tp: int = 1
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = defaults.MAX_NUM_SEQS
    max_num_batched_tokens: int = defaults.MAX_NUM_BATCHED_TOKENS
    block_size: int = defaults.BLOCK_SIZE
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    prefix_caching: bool = True
    warm_up: str = "off"
    speculate: str = "off"
    speculate_tokens: int | None = None
    canary: bool = True
    invariant: bool = False
    lora: dict[str, str] = {}
    lora_memory: int = 0
    share_gpus: bool = False
    executor: str = "local"
    ranks_per_node: int | None = None
    interface: str | None = None
    ray_address: str | None = None
    node_wait_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("tp", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            self._at_least_one(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory", "num_blocks", "ranks_per_node", "speculate_tokens"):
            if getattr(self, name) is not None:
                self._at_least_one(name, getattr(self, name))
        if isinstance(self.lora_memory, bool) or not isinstance(self.lora_memory, int) or self.lora_memory < 0:
            raise ConfigError("bad_option", f"lora_memory is {self.lora_memory!r}.", "It must be bytes, or 0.")
        if not isinstance(self.lora, dict) or not all(self.lora):
            raise ConfigError("bad_option", f"lora is {self.lora!r}.", "Give folders of adapters by name.")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError("bad_option", f"gpu_memory_utilization is {share!r}.", "Use a share above 0, 1 at most.")
        for name, known in (("dtype", PLAIN), ("state_dtype", STATE_DTYPES)):
            msgspec.structs.force_setattr(self, name, _dtype(name, getattr(self, name), known))
        self._one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        self._one_of("load_format", self.load_format, LOAD_FORMATS)
        self._one_of("device", self.device, ("auto", "cpu", "cuda"))
        self._one_of("executor", self.executor, EXECUTORS)
        self._one_of("warm_up", self.warm_up, WARM_UPS)
        if self.speculate != "off":
            self._check_drafts()
        elif self.speculate_tokens is not None:
            raise ConfigError(
                "bad_option",
                "speculate_tokens is given, but speculate is off.",
                "Say what drafts, such as speculate auto.",
            )
        for name in ("ranks_per_node", "interface", "ray_address"):
            if self.executor == "local" and getattr(self, name) is not None:
                raise ConfigError("bad_option", f"{name} is given, but the executor is local.", "Use executor ray.")
        if self.executor == "ray" and self.share_gpus:
            raise ConfigError("bad_option", "share_gpus is given, but the executor is ray.", "Use executor local.")

    @property
    def most_drafts(self) -> int:
        """Guesses a request and step, if there are any."""
        return self.speculate_tokens or min(MOST_DRAFTS, self.max_num_seqs - 1)

    @property
    def drafts(self) -> int:
        """The same, or none."""
        return 0 if self.speculate == "off" else self.most_drafts

    def _check_drafts(self) -> None:
        """A row of drafts takes as many places of a batch, and of the graphs for it, as it has tokens."""
        most = min(MOST_DRAFTS, self.max_num_seqs - 1)
        if most < 1:
            raise ConfigError(
                "too_many_drafts",
                "speculate is given, but max_num_seqs is 1: a token and a draft take two places of a batch.",
                "Use max_num_seqs 2 or more, or speculate off.",
            )
        if self.speculate_tokens is not None and self.speculate_tokens > most:
            raise ConfigError(
                "too_many_drafts",
                f"speculate_tokens is {self.speculate_tokens}; with max_num_seqs {self.max_num_seqs} a row holds "
                f"{most} beside its own token.",
                f"Use at most {most}."
                + (f" For up to {MOST_DRAFTS}, raise max_num_seqs." if most < MOST_DRAFTS else ""),
            )

    def _at_least_one(self, name: str, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError("bad_option", f"{name} is {value!r}.", "It must be a whole number of at least 1.")

    def _one_of(self, name: str, value: str, known: tuple[str, ...]) -> None:
        if value not in known:
            raise ConfigError("bad_option", f"{name} is {value!r}.", f"Use one of {', '.join(known)}.")


def _dtype(option: str, asked: object, known: tuple[str, ...]) -> str:
    """By our name, whichever it goes by: a torch dtype calls itself `torch.bfloat16`."""
    name, names = str(asked).removeprefix("torch."), [each for each, own in DTYPE_NAMES.items() if own in known]
    if name == "auto" or name in names:
        return DTYPE_NAMES.get(name, name)
    raise ConfigError("bad_option", f"{option} is {asked!r}.", f"Use one of auto, {', '.join(names)}.")
