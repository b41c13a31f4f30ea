"""What layers keep of a sequence whatever its length, copied from place to place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

WORD = 4
"""Bytes that a GPU copies at a time."""


class States:
    """Those of all layers, each [places, ...]."""

    def __init__(self, states: Iterable[Tensor]) -> None:
        self._states = list(states)

    @cached_property
    def _table(self) -> Tensor:
        """Where each lies, and how many words of it a place has."""
        words = [state[0].nbytes // WORD for state in self._states]
        assert all(state[0].nbytes % WORD == 0 for state in self._states)
        rows = [[state.data_ptr(), count] for state, count in zip(self._states, words, strict=True)]
        return torch.tensor(rows, device=self._states[0].device)

    @cached_property
    def _most_words(self) -> int:
        return max(state[0].nbytes // WORD for state in self._states)

    def copy(self, source: Tensor, target: Tensor, apart: bool) -> None:
        """What is in each place of `source` is then in that of `target` too. `apart`: no place is in both."""
        if self._states and source.is_cuda and apart:
            from phalanx.kernels.gpu import states as gpu

            gpu.copy_states(self._table, self._most_words, source, target)
            return
        for state in self._states:
            state[target] = state[source]
