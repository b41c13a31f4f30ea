"""The masks of grammars that a rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.engine.masks import unpack

Send = Callable[..., tuple[Tensor, ...]]


class Masks:
    """Masks by the places that plans give them, on the host and on the device: there one bit a token, 64 in a word."""

    def __init__(self, places: int, device: torch.device) -> None:
        self.on_host = [b""] * places
        self._device = device
        self._words: Tensor | None = None

    def take_in(self, new: Sequence[tuple[int, bytes]], send: Send) -> None:
        """Unpack masks and put them into their places."""
        if not new:
            return
        masks = [unpack(packed) for _, packed in new]
        for (place, _), mask in zip(new, masks, strict=True):
            self.on_host[place] = mask
        words = -(-len(masks[0]) // 8)
        octets = bytearray(b"".join(mask.ljust(8 * words, b"\0") for mask in masks))
        if self._words is None:
            self._words = torch.zeros(len(self.on_host), words, dtype=torch.int64, device=self._device)
        where, bits = send(torch.tensor([place for place, _ in new]), torch.frombuffer(octets, dtype=torch.int64))
        self._words[where] = bits.view(-1, words)

    def allowed(self, places: Tensor, vocab: int) -> Tensor:
        """For each place a row that says of every token whether it may come. Tokens beyond a mask may not."""
        assert self._words is not None, "no mask has come yet"
        octets = self._words[places].view(torch.uint8)[:, :, None]
        bits = (octets >> torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1
        found = bits.flatten(1)[:, :vocab].bool()
        return pad(found, (0, vocab - found.shape[1]))
