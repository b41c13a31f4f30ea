"""Tiny random checkpoints of every family, saved by transformers, with what transformers itself generates from them."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import certifi
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG as httpx_patience
from hypothesis import settings

from tests.card import on_the_card
from tests.quick import changed_files, leave_out, leave_out_unneeded, may_be_needed

pytest_plugins = ["tests.groups"]
settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=1000)
settings.load_profile("steady")

NEW_TOKENS = 40
VOCAB = 512

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MLA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INDEXER = {"index_topk": 20, "index_head_dim": 24, "index_n_heads": 16}
"""With few index heads, relu leaves ties at zero that prompts and decodes break differently."""

DELTA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
DELTA_MOE = DELTA | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
SLOW_DECAY = -4.0
"""Of a delta net's A_log: states of a larger one forget within tokens, and nobody would notice which they were."""

LOGIT_NOISE = 2.0**12 * 2.0**-23
"""How far apart logits of these models may be: of some 2, by sums of 144 products through 4 layers in another order. On
four processors, and by other instructions of theirs, it was a tenth of this at most."""
SCORE_NOISE = 1e-4
"""How far logits may be from those of transformers in float32: twice what was seen. Its own in float64 are as far from
either."""
PROMPTS = {
    "phi3": 20,
    "deepseek_v32": 20,
    "llama3_rope": 8,
    "qwen2": 14,
    "qwen3_moe": 11,
    "deepseek_v4": 13,
    "qwen3_next": 15,
    "qwen3_5_text": 14,
    "qwen3_5_moe_text": 19,
}
"""Seeds of the prompts of families, where it is not 7."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 208},
    "llama3_rope": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32, "vocab_size": 500},
    "qwen3_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
    },
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24},
    "phi3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 20,
        "rope_parameters": {"partial_rotary_factor": 0.75},
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "olmo2": {"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "granite": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 160,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "glm4_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": MLA | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    "kimi_like": MLA | {"model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": MLA | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    "deepseek_v32": MLA | INDEXER,
    "glm_moe_dsa": MLA | INDEXER | {"indexer_types": ["full", "shared", "full", "shared"]},
    "minimax_m2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_next": DELTA_MOE | {"mlp_only_layers": [1], "linear_conv_kernel_dim": 3},
    "qwen3_5_text": DELTA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "qwen3_5_moe_text": DELTA_MOE | {"shared_expert_intermediate_size": 48},
    "deepseek_v4": {
        "num_attention_heads": 12,
        "head_dim": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "o_groups": 4,
        "o_lora_rank": 20,
        "moe_intermediate_size": 48,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rate_csa": 4,
        "compress_rate_hca": 12,
        "num_hash_layers": 2,
        "hc_sinkhorn_iters": 3,
        "routed_scaling_factor": 1.3,
        "swiglu_limit": 1.0,
        "sliding_window": 20,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 5,
        "rope_parameters": YARN,
    },
    "llama4_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "intermediate_size_mlp": 160,
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": True,
        "attention_chunk_size": 24,
        "floor_scale": 16,
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="run the quick tests of changed parts and the slow ones of changed files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are only seen by the tests marked `cuda`, which only `pytest -m cuda` runs: all others mean the CPU.

    A process has one thread to compute with: models are tiny, and on cores that others use too, threads that wait for
    each other take twenty times as long.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hasattr(config, "workerinput"):  # a worker has it from who started it
        _trust_one_authority(config)
    _be_patient()
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _be_patient() -> None:
    """An HTTP client that is told no time waits a minute, not five seconds."""
    httpx_patience.connect = httpx_patience.read = httpx_patience.write = httpx_patience.pool = 60.0


def _trust_one_authority(config: pytest.Config) -> None:
    """No test leaves this machine, and to read all authorities takes every HTTP client 50 ms.

    Whatever the environment says: that of a company names its own, beside all others.
    """
    end = "-----END CERTIFICATE-----\n"
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115
    file.write(Path(certifi.where()).read_text().partition(end)[0] + end)
    file.flush()
    os.environ["SSL_CERT_FILE"] = file.name
    config.add_cleanup(file.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr != "cuda":
        leave_out(config, items, lambda item: item.get_closest_marker("cuda") is not None)
    if config.option.quick:
        leave_out_unneeded(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Several workers may share a GPU. What one took of all its memory others find free again."""
    if item.config.option.markexpr != "cuda":
        return (yield)
    alone = item.get_closest_marker("whole_card") is not None
    with on_the_card(alone):
        outcome = yield
        if alone:
            gc.collect()
            sys.modules["torch"].cuda.empty_cache()
        return outcome


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which nothing is needed is not even read."""
    is_test = config.option.quick and collection_path.name.startswith("test_")
    return True if is_test and not may_be_needed(collection_path, changed_files()) else None


def pytest_collection_finish() -> None:
    """Half a second is what a look for garbage takes among all modules and tests, and none of them is any."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random numbers of a test are its own, whatever ran before it."""
    seed = zlib.crc32(item.name.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


class Reference:
    """A checkpoint folder, prompts of mixed lengths, and what transformers makes of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.model = make_checkpoint(name, folder)
        rng, vocab = random.Random(PROMPTS.get(name, 7)), self.model.config.vocab_size
        shared = [rng.randrange(vocab) for _ in range(40)]
        prompts = [[rng.randrange(vocab) for _ in range(length)] for length in (1, 5, 17, 48, 83)]
        self.prompts = [*prompts, shared + prompts[1], shared + prompts[2]]

    def scores(self, tokens: list[int]) -> Any:
        """Logits at every position."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]

    @cached_property
    def logits(self) -> Any:
        """Of the last prompt, at every position."""
        return self.scores(self.prompts[-1])

    @cached_property
    def continuations(self) -> list[list[int]]:
        """The greedy one of each prompt: made for all prompts at once, then seen to be the likeliest for each alone."""
        found = _continue(self.model, self.prompts)
        for prompt, tokens in zip(self.prompts, found, strict=True):
            scores = self.scores(prompt + tokens)[len(prompt) - 1 : -1]
            assert scores.argmax(-1).tolist() == tokens
            best, second = scores.topk(2).values.unbind(1)
            assert (best - second).min() > LOGIT_NOISE, "no matter of last bits: choose other PROMPTS"
        return found

    def confirms(self, prompt: list[int], output: list[int]) -> bool:
        """Whether each of these tokens is the likeliest behind those before it, as far as last bits do not decide."""
        import torch

        scores = self.scores(prompt + output[:-1])[len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
        return bool((scores.amax(-1) - chosen <= LOGIT_NOISE).all())


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a family's tiny model, as transformers has it."""
    from transformers import AutoConfig

    overrides = FAMILIES[name] | changes
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 144,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return AutoConfig.for_model(overrides.pop("model_type", name), **(common | overrides))


def make_checkpoint(name: str, folder: Path) -> Any:
    """A tiny model with no inert part: norms, biases and routers are random too, so that a wrong one shows."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config).eval()
    fill_randomly(model)
    model.save_pretrained(folder)
    return model


def fill_randomly(model: Any) -> None:
    import torch

    config = model.config
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            mean = _mean(key, hasattr(config, "linear_num_key_heads")) if tensor.dim() == 1 else 0.0
            torch.nn.init.normal_(tensor, mean=mean, std=0.15)
        else:
            tensor.copy_(torch.rand(len(tensor), config.num_local_experts).argsort()[:, : tensor.shape[1]])


def _mean(vector: str, delta_nets: bool) -> float:
    """Where delta nets are, norms add 1 to their weights, but for those inside the nets."""
    if vector.endswith("A_log"):
        return SLOW_DECAY
    return 0.0 if delta_nets and "norm" in vector and "linear_attn" not in vector else 1.0


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a family, made when first asked for."""
    return cache(lambda name: Reference(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="session", params=["llama3_rope", "qwen2", "qwen3_moe"])
def captured(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    """Of families whose steps a GPU captures."""
    return references(request.param)


@pytest.fixture(scope="session", params=["llama3_rope", "qwen3_moe", "deepseek_v32"])
def some_reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    """For what does not depend on the family."""
    return references(request.param)


def _continue(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    given = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=given, max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[:, longest:].tolist()


@contextmanager
def plain_mappings() -> Iterator[None]:
    """The gguf package takes a file apart by 250,000 slices: those of a plain array take a third of a memmap's time."""
    import numpy as np

    mapped = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda *given, **named: mapped(*given, **named).view(np.ndarray))
        yield


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of engines in this process start at once: see `tests/forked.py`."""
    from phalanx.runtime import child
    from tests.forked import forked_rank

    monkeypatch.setattr(child, "start", forked_rank)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """For tests of what the garbage collector is kept from: after them it is kept from all that is here, as before."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session")
def known_ceilings() -> Callable[..., Any]:
    """Those of this machine, measured once."""
    from phalanx.bench.ceilings import measure_ceilings

    return cache(measure_ceilings)


@pytest.fixture
def unsteady_figures(known_ceilings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `bench offline`: no look for garbage before each run, which takes longer than the run does."""
    from phalanx.bench import offline, timing

    monkeypatch.setattr(timing, "settled_memory", nullcontext)
    monkeypatch.setattr(offline, "measure_ceilings", known_ceilings)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_llama")
    make_checkpoint("llama", folder)
    return folder
