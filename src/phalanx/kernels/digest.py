"""Digests of memory, by which two copies of the same bits are told from each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.kernels import cpu

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8


def words(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, as wide as its rows and its place allow."""
    row_bytes = tensor.shape[-1] * tensor.itemsize
    whole = row_bytes % _WORD_BYTES == 0 == tensor.data_ptr() % _WORD_BYTES
    return tensor.view(_WORDS[_WORD_BYTES if whole else tensor.itemsize])


def row_digest(rows: Tensor, out: Tensor) -> None:
    """A digest of [..., width] numbers into `out`, a whole number: another one if any one bit is another.

    It is a sum modulo 2^64 of all words, each times the odd number of its column: the same in any order.
    """
    width, rest = divmod(rows.shape[-1] * rows.itemsize, _WORD_BYTES)
    if rows.is_cpu and not rest and rows.is_contiguous() and cpu.library() is not None:
        cpu.call("row_digest", rows, out, rows.nbytes // (_WORD_BYTES * width), width)
    else:
        row_digest_torch(rows.contiguous(), out)


def digests_into(marks: Tensor) -> Callable[[int, Tensor], None]:
    """What puts the digest of rows into one of these numbers. On a CPU it is called many times a step: all that does
    not change is looked up now.
    """
    places, kernels = list(marks), cpu.library() if marks.is_cpu else None
    if kernels is None:
        return lambda place, rows: row_digest(rows, places[place])
    digest, addresses = kernels.row_digest, [place.data_ptr() for place in places]

    def put(place: int, rows: Tensor) -> None:
        shape = rows.shape
        if len(shape) != 2 or shape[1] % 2 or rows.dtype is not torch.float32 or not rows.is_contiguous():
            row_digest(rows, places[place])
        else:
            digest(rows.data_ptr(), addresses[place], shape[0], shape[1] // 2)

    return put


def row_digest_torch(rows: Tensor, out: Tensor) -> None:
    """The definition."""
    bits = words(rows).flatten(0, -2)
    odd = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device)
    torch.sum(bits * odd, dim=(0, 1), out=out)


def plain_digests(words: Tensor) -> Tensor:
    """The sum of the words of each row modulo 2^64: one flipped bit changes it for sure. Nothing is copied."""
    return words.sum(-1, dtype=torch.int64)
