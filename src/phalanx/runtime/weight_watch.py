"""WeightWatch: whether the weights are still what was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import EngineDeadError
from phalanx.kernels.digest import plain_digests, words
from phalanx.layers.decoder import Decoder

PASS_STEPS = 1024
"""Steps in which a dense model is read once. A decode reads all of it anyway: this is a thousandth more."""

LEAST_BYTES = 1 << 16
"""It takes as long to begin a reading as to read that much: tiny models are read in fewer steps."""

PAUSES = {"cpu": 4, "cuda": 8}
"""It takes longer to begin a reading than to read that much: as much more is read every so many steps."""


class Stretch(NamedTuple):
    """A stretch of a tensor's memory, as whole numbers."""

    name: str
    words: Tensor


class WatchTurn(NamedTuple):
    """What is read at once. Stretches as long as each other that lie in one memory at even distances, as those of
    experts do, are the rows of a matrix, which one kernel reads.
    """

    names: list[str]
    rows: list[Tensor]

    @classmethod
    def of(cls, stretches: list[Stretch]) -> WatchTurn:
        runs = list(_runs(stretches))
        return cls([piece.name for run in runs for piece in run], [_matrix(run) for run in runs])

    def digests(self) -> Tensor:
        """One for each name."""
        found = [plain_digests(rows) for rows in self.rows]
        return found[0] if len(found) == 1 else torch.cat(found)


class DigestReading(NamedTuple):
    """Digests on their way to the host, and of which turn they are."""

    turn: int
    digests: Tensor


class WeightWatch:
    """Reads a little of this rank's weights behind every step and holds it against what it was after loading.

    Who has but a share of its parameters active in a step reads as much less at a time.
    """

    def __init__(self, model: Decoder) -> None:
        spec = model.place.spec
        self._rank = model.place.group.rank
        tensors = [(name, tensor) for name, part in model.weights() for tensor in _tensors(part) if tensor.numel()]
        total = sum(tensor.nbytes for _, tensor in tensors)
        self._pause = PAUSES[model.place.device.type]
        at_once = max(LEAST_BYTES, int(total * spec.active_parameters / spec.parameters / PASS_STEPS * self._pause))
        self._turns = [WatchTurn.of(stretches) for stretches in _turns(tensors, at_once)]
        self._loaded = [turn.digests().tolist() for turn in self._turns]
        self._next = self._steps = 0

    @property
    def steps(self) -> int:
        """After so many steps every weight has been looked at."""
        return len(self._turns) * self._pause

    def read(self) -> DigestReading | None:
        """Behind a step: begin the next turn, if it is time. Its digests may be checked once the device has come that
        far.
        """
        self._steps += 1
        if self._steps % self._pause:
            return None
        turn, self._next = self._next, (self._next + 1) % len(self._turns)
        return DigestReading(turn, self._turns[turn].digests().to("cpu", non_blocking=True))

    def check(self, reading: DigestReading) -> None:
        turn, found = self._turns[reading.turn], reading.digests.tolist()
        for name, before, now in zip(turn.names, self._loaded[reading.turn], found, strict=True):
            if before != now:
                raise EngineDeadError(
                    "weight_damaged",
                    f"{name} on rank {self._rank} is not what was loaded.",
                    "Its memory is failing: look at ECC errors (dmesg, nvidia-smi -q) before it serves again.",
                )


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    else:
        yield from (field for field in vars(part).values() if isinstance(field, Tensor))


def _turns(tensors: list[tuple[str, Tensor]], at_once: int) -> Iterator[list[Stretch]]:
    """Pieces of about so many bytes together, in order."""
    turn: list[Stretch] = []
    room = at_once
    for name, tensor in tensors:
        for memory in _cut(tensor, at_once):
            turn.append(Stretch(name, words(memory)))
            room -= memory.nbytes
            if room <= 0:
                yield turn
                turn, room = [], at_once
    if turn:
        yield turn


def _cut(tensor: Tensor, at_once: int) -> Iterator[Tensor]:
    yield from tensor.reshape(-1).split(max(8, at_once // tensor.itemsize // 8 * 8))


def _runs(stretches: list[Stretch]) -> Iterator[list[Stretch]]:
    """Those that are the rows of one matrix, in the order in which they lie."""
    alike: dict[tuple[object, ...], list[Stretch]] = {}
    for piece in stretches:
        words = piece.words
        alike.setdefault((words.untyped_storage().data_ptr(), words.dtype, words.numel()), []).append(piece)
    for pieces in alike.values():
        run: list[Stretch] = []
        for piece in sorted(pieces, key=_place):
            if len(run) > 1 and _place(piece) - _place(run[-1]) != _place(run[1]) - _place(run[0]):
                yield run
                run = []
            run.append(piece)
        yield run


def _place(piece: Stretch) -> int:
    return int(piece.words.storage_offset())


def _matrix(run: list[Stretch]) -> Tensor:
    first = run[0].words
    apart = _place(run[1]) - _place(run[0]) if len(run) > 1 else first.numel()
    return first.as_strided((len(run), first.numel()), (apart, 1))
