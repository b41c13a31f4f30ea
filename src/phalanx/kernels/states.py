"""What layers keep of a sequence whatever its length, copied from place to place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WORD = 4
"""Bytes that a GPU copies at a time."""


class States:
    """Those of all layers, each [places, ...]."""

    def __init__(self, states: Iterable[Tensor]) -> None:
        self._states = list(states)
        bytes_of_place = [state[0].nbytes for state in self._states]
        assert not any(count % WORD for count in bytes_of_place)
        words = [count // WORD for count in bytes_of_place]
        self.most_words = max(words, default=0)
        rows = [[state.data_ptr(), count] for state, count in zip(self._states, words, strict=True)]
        self.table = torch.tensor(rows, device=self._states[0].device if rows else None)
        """Where each lies, and how many words of it a place has."""

    def copy(self, source: Tensor, target: Tensor, apart: bool) -> None:
        """What is in each place of `source` is then in that of `target` too. `apart`: no place is in both."""
        if self._states and source.is_cuda and apart:
            from phalanx.kernels.gpu import states as gpu

            gpu.copy_states(self.table, self.most_words, source, target)
            return
        for state in self._states:
            state[target] = state[source]
