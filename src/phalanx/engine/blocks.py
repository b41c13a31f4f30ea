"""Blocks of the KV cache: who holds them, and which prefix they remember."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from phalanx.errors import ConfigError

Parent = int | str | tuple[int, str | None] | None


class PrefixCache:
    """Finds the block that already holds a prefix.

    The key of a block is its own tokens together with the node number of the block before it, so a key stands for the
    whole prefix. The dictionary hashes that chain and, on a match, compares the tokens themselves: two prefixes that
    only share a hash never share a block. A first block's parent is the request's root, its salt and its adapter:
    tenants with different salts live in different trees. Where groups of layers look back on a window only, each has
    blocks of its own for a node, as long as they are kept.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[tuple[Parent, tuple[int, ...]], tuple[int, int]] = {}
        self._keys: dict[int, tuple[Parent, tuple[int, ...]]] = {}
        self._windows: dict[tuple[int, int], int] = {}
        self._in_window: dict[int, tuple[int, int]] = {}
        self._next_node = 0

    def __contains__(self, block: int) -> bool:
        return block in self._keys or block in self._in_window

    def __len__(self) -> int:
        return len(self._keys) + len(self._in_window)

    def match(self, tokens: Sequence[int], root: Parent) -> tuple[list[int], list[int]]:
        """The blocks that hold the longest cached prefix made of whole blocks, and their nodes."""
        blocks: list[int] = []
        nodes: list[int] = []
        parent = root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = self._blocks.get((parent, tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            block, parent = found
            blocks.append(block)
            nodes.append(parent)
        return blocks, nodes

    def knows(self, parent: Parent, tokens: tuple[int, ...]) -> bool:
        """Whether a block of these tokens follows the block with this node."""
        return (parent, tokens) in self._blocks

    def insert(self, parent: Parent, tokens: Sequence[int], block: int) -> int:
        """Remember a full block; its node is the next one's parent. A prefix already known keeps its first block."""
        key = (parent, tuple(tokens))
        known = self._blocks.get(key)
        if known is not None:
            return known[1]
        self._next_node += 1
        self._blocks[key] = (block, self._next_node)
        self._keys[block] = key
        return self._next_node

    def insert_window(self, node: int, group: int, block: int) -> None:
        """Remember what a group of layers with a window keeps of the tokens of a node, unless it is known."""
        if (node, group) not in self._windows:
            self._windows[node, group] = block
            self._in_window[block] = (node, group)

    def window(self, node: int, group: int) -> int | None:
        return self._windows.get((node, group))

    def forget(self, block: int) -> None:
        """A node that is forgotten leaves what windows keep of it behind: that goes when its time comes."""
        if block in self._keys:
            del self._blocks[self._keys.pop(block)]
        else:
            del self._windows[self._in_window.pop(block)]


class BlockPool:
    """Counts references to blocks. A block nobody holds is free, or idle while the prefix cache still remembers it.

    Idle blocks are given out last, least recently used first. Steps run in the order they are launched, so a block can
    be given out again while a launched step still uses it: the new owner's writes come after. Blocks are numbered from
    `first` on.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, first: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                "no_blocks", f"{num_blocks} KV blocks of {block_size} tokens.", "Both must be at least 1."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size) if prefix_caching else None
        self.references = [0] * (first + num_blocks)
        self._free = deque(range(first, first + num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def beside(self, num_blocks: int) -> BlockPool:
        """Blocks of another kind, whose numbers are none of these or of the one behind, under the same prefixes."""
        other = BlockPool(num_blocks, self.block_size, first=self.num_blocks + 1)
        other.cache = self.cache
        return other

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds but whose prefix may be asked for again."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference each. The caller has checked `available`."""
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            assert self.cache is not None
            self.cache.forget(block)
        self.references[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks found in the prefix cache."""
        for block in blocks:
            if self.references[block] == 0:
                del self._idle[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference each. The tail of a sequence goes first, so that its head stays cached longer."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released more often than held"
            self.references[block] -= 1
            if self.references[block] == 0:
                if self.cache is not None and block in self.cache:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget_idle(self) -> None:
        """Forget all prefixes that nobody uses now."""
        while self._idle:
            block, _ = self._idle.popitem()
            assert self.cache is not None
            self.cache.forget(block)
            self._free.append(block)
