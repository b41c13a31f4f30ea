"""GGUF files: header, model spec and tensor slices. Dequantising is the `gguf` package's."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from phalanx.errors import CheckpointError, ModelError
from phalanx.spec import ModelSpec
from phalanx.weights.reader import Slices

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ROWS_AT_ONCE = 4096

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: shape with the slowest dimension first, as torch counts."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // per_block * block_bytes

    @property
    def bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """The header of a GGUF file, which every rank reads. The package's own reader takes seconds over a vocabulary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._read_header(file)
        except (OSError, struct.error, KeyError, ValueError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                "broken_file", f"{path} is no readable GGUF file: {error!r}.", "Download it again."
            ) from None

    def _read_header(self, file: Any) -> None:
        magic, version = struct.unpack("<4sI", file.read(8))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        tensors, pairs = struct.unpack("<QQ", file.read(16))
        self.fields: dict[str, Any] = {}
        for _ in range(pairs):
            key = _read_string(file)
            self.fields[key] = _read_value(file, _read_scalar(file, "<I"))
        self.tensors: dict[str, _Stored] = {}
        for _ in range(tensors):
            name, rank = _read_string(file), _read_scalar(file, "<I")
            shape = struct.unpack(f"<{rank}Q", file.read(8 * rank))
            kind, offset = struct.unpack("<IQ", file.read(12))
            self.tensors[name] = _Stored(tuple(reversed(shape)), GGMLQuantizationType(kind), offset)
        alignment = self.fields.get("general.alignment", 32)
        self.data_start = -(-file.tell() // alignment) * alignment
        needed, size = (stored.offset + stored.bytes for stored in self.tensors.values()), self.path.stat().st_size
        if self.data_start + max(needed, default=-self.data_start) > size:
            raise ValueError(f"its tensors reach beyond its {size} bytes")

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the file's own architecture, such as `block_count`."""
        return self.fields.get(f"{self.fields['general.architecture']}.{key}", default)

    def spec(self) -> ModelSpec:
        """The model this file holds, read as the Hugging Face configuration it came from."""
        architecture, experts = self.fields["general.architecture"], self.get("expert_count")
        families = {"llama": "mixtral" if experts else "llama", "qwen3moe": "qwen3_moe"}
        if "rope_freqs.weight" in self.tensors:
            raise ModelError(
                "unsupported_rope",
                f"{self.path.name} stretches its rope by a table of factors (rope_freqs.weight).",
                "Use the safetensors version of this model.",
            )
        if "token_embd.weight" not in self.tensors:
            raise CheckpointError(
                "missing_tensor", f"{self.path.name} has no token_embd.weight.", "Is this a causal language model?"
            )
        heads = self.get("attention.head_count")
        scaling: dict[str, Any] = {"rope_theta": self.get("rope.freq_base", 10000.0)}
        if self.get("rope.scaling.type", "none") != "none":
            scaling |= {
                "rope_type": self.get("rope.scaling.type"),
                "factor": self.get("rope.scaling.factor"),
                "original_max_position_embeddings": self.get("rope.scaling.original_context_length"),
            }
        inner = self.get("feed_forward_length")
        return ModelSpec.from_config(
            {
                "model_type": families.get(architecture, architecture),
                "num_hidden_layers": self.get("block_count"),
                "hidden_size": self.get("embedding_length"),
                "intermediate_size": inner or self.get("expert_feed_forward_length"),
                "num_attention_heads": heads,
                "num_key_value_heads": self.get("attention.head_count_kv", heads),
                "head_dim": self.get("attention.key_length"),
                "vocab_size": self.tensors["token_embd.weight"].shape[0],
                "max_position_embeddings": self.get("context_length"),
                "rms_norm_eps": self.get("attention.layer_norm_rms_epsilon"),
                "rope_parameters": scaling,
                "tie_word_embeddings": "output.weight" not in self.tensors,
                "attention_bias": "blk.0.attn_q.bias" in self.tensors and "blk.0.attn_output.bias" in self.tensors,
                "num_experts": experts,
                "num_experts_per_tok": self.get("expert_used_count"),
                "moe_intermediate_size": self.get("expert_feed_forward_length"),
                "norm_topk_prob": True,
                "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"),
                "eos_token_id": self.fields.get("tokenizer.ggml.eos_token_id"),
                "dtype": "float32",
            }
        )


def _read_scalar(file: Any, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _read_string(file: Any) -> str:
    return file.read(_read_scalar(file, "<Q")).decode("utf-8")


def _read_value(file: Any, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _read_scalar(file, _SCALARS[kind])
    item, count = struct.unpack("<IQ", file.read(12))
    if item in (_STRING, _ARRAY):
        return [_read_value(file, item) for _ in range(count)]
    layout = f"<{count}{_SCALARS[item][1]}"
    return list(struct.unpack(layout, file.read(struct.calcsize(layout))))


class GgufReader:
    """Slices of a GGUF file's tensors as float32, under their Hugging Face names.

    llama-architecture files keep the rows of q and k as interleaved rotary pairs; they are handed out half-split.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        architecture = self._file.fields["general.architecture"]
        self._interleaved = architecture == "llama"
        self._head_dim = self._file.spec().head_dim

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored, expert = self._find(name)
        if stored is None:
            return None
        return stored.shape if expert is None else stored.shape[1:]

    def is_fp8(self, name: str) -> bool:
        return False

    def read(self, name: str, slices: Slices) -> Tensor:
        stored, expert = self._find(name)
        assert stored is not None
        if any(part.start == part.stop for part in slices):
            return torch.empty([part.stop - part.start for part in slices])
        rows, (part, *columns) = self._quantised_rows(stored, expert), slices
        if not columns:
            values = dequantize(rows, stored.kind)[0, part].astype(np.float32)
        else:
            starts = range(part.start, part.stop, _ROWS_AT_ONCE)
            pieces = (rows[start : min(start + _ROWS_AT_ONCE, part.stop)] for start in starts)
            values = np.concatenate([dequantize(piece, stored.kind)[:, columns[0]] for piece in pieces])
        if self._interleaved and re.search(r"\.(q|k)_proj\.", name):
            pairs = values.reshape(-1, self._head_dim // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _quantised_rows(self, stored: _Stored, expert: int | None) -> np.ndarray:
        """The raw bytes of the tensor, or of one expert's matrix in it, by rows; a vector is a single row."""
        start = self._file.data_start + stored.offset
        rows = self._bytes[start : start + stored.bytes].reshape(*stored.shape[:-1], stored.row_bytes)
        rows = rows if expert is None else rows[expert]
        return _as_numbers(np.atleast_2d(rows), stored.kind)

    def _find(self, name: str) -> tuple[_Stored | None, int | None]:
        stem, _, leaf = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        if layer is None:
            return self._file.tensors.get(f"{_TOP_NAMES.get(stem, stem)}.{leaf}"), None
        number, path = layer.groups()
        expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", path)
        if expert is None:
            return self._file.tensors.get(f"blk.{number}.{_LAYER_NAMES.get(path, path)}.{leaf}"), None
        matrix = _EXPERT_NAMES[expert.group(2)]
        return self._file.tensors.get(f"blk.{number}.ffn_{matrix}_exps.{leaf}"), int(expert.group(1))

    def close(self) -> None:
        del self._bytes


def _as_numbers(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Plain formats are viewed as their numbers, which is how `dequantize` wants them."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return raw.view(plain[kind]) if kind in plain else raw
