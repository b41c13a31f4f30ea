"""Gated delta net: a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.spec.cache import LayerCache
from phalanx.spec.formats import FORMATS
from phalanx.spec.tensors import Run, Stored, Tensor


def updates_beside(most: int) -> int:
    """That a GPU keeps beside a state, with so many tokens of a sequence in a step.

    To write a state takes as long as to read it, which once in a while is no matter: there is room for several steps
    without drafts, and for two with them, which write it each time.
    """
    return max(8, 2 * most)


@dataclass(frozen=True)
class DeltaNet:
    """Dealt by key heads, each with the value heads that share it.

    `grouped`: checkpoints keep all projections of a key head together, in two tensors; otherwise queries, keys and
    values one after the other, and the rest on its own. Of the last tokens, `pending` at most, what they do to a state
    is kept beside it: it can go on before any of them, since drafts may be wrong. With 0 it cannot. A GPU keeps more of
    them, for its own sake. A state is kept in `state_format`, and computed with in float32.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    grouped: bool = False
    module: str = "linear_attn"
    pending: int = 0
    state_format: str = "fp32"

    latent = False
    rope = None
    heads = 0
    kv_heads = 0
    head_dim = 0
    head_group = 1
    reads = ()
    pairs = ()

    @property
    def state_heads(self) -> int:
        return self.k_heads

    @property
    def state_value_heads(self) -> int:
        return self.v_heads

    @property
    def channels(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def ring(self) -> int:
        """Columns that are kept: those that the convolution looks back on, and those of a step."""
        return self.kernel - 1 + max(1, self.pending)

    @property
    def state_bytes(self) -> int:
        """The recurrent state in its format and in bf16 the last columns."""
        state = FORMATS[self.state_format].bits // 8 * self.v_heads * self.k_dim * self.v_dim
        return state + 2 * self.channels * self.ring

    @property
    def beside_bytes(self) -> int:
        """What tokens do to it that is pending, and since which position."""
        updates = updates_beside(max(1, self.pending))
        return 4 * self.v_heads * (updates * (self.k_dim + self.v_dim + 1) + self.v_dim)

    @property
    def cache(self) -> LayerCache:
        return LayerCache(
            "state", state_bytes=self.state_bytes, beside_bytes=self.beside_bytes, goes_back=self.pending > 0
        )

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        path = f"{prefix}{self.module}."
        key, value = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        sizes = {"q": key, "k": key, "v": value, "z": value, "b": self.v_heads, "a": self.v_heads}
        for letter, rows in sizes.items():
            source = self._grouped(path, letter) if self.grouped else self._flat(path, letter)
            yield Tensor(
                f"{path}in_proj_{letter}.weight", (rows, hidden), "state", is_linear=letter in "qkvz", sources=source
            )
        for letter, rows, first in (("q", key, 0), ("k", key, key), ("v", value, 2 * key)):
            stored = Stored(path + "conv1d.weight", run=Run(rows, self.channels, first))
            yield Tensor(f"{path}conv_{letter}.weight", (rows, 1, self.kernel), "state", sources=(stored,))
        yield Tensor(path + "A_log", (self.v_heads,), "state", wide=True)
        yield Tensor(path + "dt_bias", (self.v_heads,), "state", wide=True)
        yield Tensor(path + "norm.weight", (self.v_dim,))
        yield Tensor(path + "out_proj.weight", (hidden, value), "state", axis=1, is_linear=True)

    def _flat(self, path: str, letter: str) -> tuple[Stored, ...]:
        if letter not in "qkv":
            return ()
        key = self.k_heads * self.k_dim
        first = {"q": 0, "k": key, "v": 2 * key}[letter]
        rows = key if letter != "v" else self.v_heads * self.v_dim
        return (Stored(path + "in_proj_qkv.weight", run=Run(rows, self.channels, first)),)

    def _grouped(self, path: str, letter: str) -> tuple[Stored, ...]:
        shared = self.v_heads // self.k_heads
        if letter in "ba":
            run = Run(shared, 2 * shared, shared * (letter == "a"))
            return (Stored(path + "in_proj_ba.weight", run=run),)
        value = shared * self.v_dim
        stride = 2 * self.k_dim + 2 * value
        width, first = {
            "q": (self.k_dim, 0),
            "k": (self.k_dim, self.k_dim),
            "v": (value, 2 * self.k_dim),
            "z": (value, 2 * self.k_dim + value),
        }[letter]
        return (Stored(path + "in_proj_qkvz.weight", run=Run(width, stride, first)),)
