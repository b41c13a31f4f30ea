"""The tensors of a GGUF file slice by slice. Dequantising is the `gguf` package's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.models.gguf import gguf_spec, keeps_pairs_together
from phalanx.spec.gguf import GgufFile, StoredTensor
from phalanx.spec.schemes import GGUF_BLOCK_BYTES, Role, Scheme, gguf
from phalanx.weights.reader import Pieces, Slices

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


class GgufReader:
    """Slices of a GGUF file's tensors as float32, under their Hugging Face names.

    Some files keep the rows of q and k as interleaved rotary pairs; they are handed out half-split.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        for name, stored in self._file.tensors.items():
            _check_kind(path, name, stored.kind)
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        self._interleaved = keeps_pairs_together(self._file)
        self._spec = gguf_spec(self._file)
        self._head_dim = self._spec.head_dim

    def names(self) -> list[str]:
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored, expert = self._find(name)
        if stored is None:
            return None
        return stored.shape if expert is None else stored.shape[1:]

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
        return torch.from_numpy(np.ascontiguousarray(self._in_order(name, values)))

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        if not self._interleaved or not re.search(r"\.(q|k)_proj\.", name):
            return rows
        pairs = rows.reshape(-1, self._head_dim // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def scheme_of(self, name: str) -> Scheme | None:
        """Of the kinds whose blocks are read as they are; the others are handed out widened."""
        stored, _ = self._find(name)
        kind = stored.kind.name.lower() if stored is not None and len(stored.shape) > 1 else ""
        return gguf(kind) if kind in GGUF_BLOCK_BYTES else None

    def read_pieces(self, name: str, slices: Slices, roles: Sequence[Role] = ()) -> Pieces:
        (stored, expert), scheme = self._find(name), self.scheme_of(name)
        assert stored is not None
        assert scheme is not None
        piece = scheme.pieces[0]
        rows, blocks = piece.part(slices)
        values = self._quantised_rows(stored, expert)[rows].reshape(rows.stop - rows.start, -1, *piece.trailing)
        return {"values": torch.from_numpy(self._in_order(name, values[:, blocks]).copy())}

    def _quantised_rows(self, stored: StoredTensor, expert: int | None) -> np.ndarray:
        """The raw bytes of the tensor, or of one expert's matrix in it, by rows; a vector is a single row."""
        start = self._file.data_start + stored.offset
        rows = self._bytes[start : start + stored.bytes].reshape(*stored.shape[:-1], stored.row_bytes)
        rows = rows if expert is None else rows[expert]
        return _as_numbers(np.atleast_2d(rows), stored.kind)

    def unknown(self) -> list[str]:
        known = {_place(name)[0] for name in self._spec.tensors}
        return [name for name in self._file.tensors if name not in known]

    def _find(self, name: str) -> tuple[StoredTensor | None, int | None]:
        place, expert = _place(name)
        return self._file.tensors.get(place), expert

    def close(self) -> None:
        del self._bytes


def _place(name: str) -> tuple[str, int | None]:
    """What the file calls a tensor, and which expert of it ours is."""
    stem, _, leaf = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer is None:
        return f"{_TOP_NAMES.get(stem, stem)}.{leaf}", None
    number, path = layer.groups()
    expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", path)
    if expert is None:
        return f"blk.{number}.{_LAYER_NAMES.get(path, path)}.{leaf}", None
    matrix = _EXPERT_NAMES[expert.group(2)]
    return f"blk.{number}.ffn_{matrix}_exps.{leaf}", int(expert.group(1))


@cache
def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_kind(path: Path, name: str, kind: GGMLQuantizationType) -> None:
    if not _can_dequantise(kind):
        raise CheckpointError(
            "unsupported_quantization",
            f"{path} keeps {name} as {kind.name}, which nothing here can read.",
            "Use a file of another quantisation, such as Q4_K_M or Q8_0.",
        )


def _as_numbers(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Plain formats are viewed as their numbers, which is how `dequantize` wants them."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return raw.view(plain[kind]) if kind in plain else raw
