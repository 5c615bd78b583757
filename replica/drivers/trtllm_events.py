"""Translates TensorRT-LLM's KV cache events into the platform's events. Pure.

TensorRT-LLM names cached blocks by its own hashes. But its events contain the tokens of each block
and the hash of the previous block. So the platform's chained hashes can be computed as well. Its
events lack the other two inputs of a chain, adapter and tenant salt (1.2 leaves both out). So this
module infers the root of a chain from the submitted requests. Among requests with the tokens of the
first block, the oldest one whose root has no such block yet determines the root. If two requests
with equal beginnings and different roots overlap, this rule can swap the roots until the blocks are
evicted. A router then expects a hit at the wrong place, and `cached_tokens` of the request corrects
this.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sluice.hashing import BLOCK_TOKENS, block_hashes

# Largest number of first blocks for which the roots of requests are remembered.
_BEGINNINGS_MAX = 65_536
_ROOTS_MAX = 64  # largest number of roots per first block


class BlockTranslator:
    """Maps TensorRT-LLM's blocks to the platform's blocks."""

    def __init__(self) -> None:
        # Tokens of a first block -> roots of requests that began with it, oldest first.
        self._roots: OrderedDict[bytes, list[bytes]] = OrderedDict()
        # (window, TensorRT-LLM's hash) -> platform's hash, or None for partial blocks and for
        # unknown roots.
        self._hashes: dict[tuple[int, Any], bytes | None] = {}
        self._holders: dict[bytes, int] = {}  # platform's hash -> number of TensorRT-LLM's blocks

    def expect(self, prompt: Sequence[int], root: bytes) -> None:
        """Record that a request with this prompt and root will be computed soon."""
        if len(prompt) < BLOCK_TOKENS:
            return
        beginning = _key(prompt[:BLOCK_TOKENS])
        roots = self._roots.setdefault(beginning, [])
        self._roots.move_to_end(beginning)
        if root not in roots:
            roots.append(root)
            del roots[:-_ROOTS_MAX]
        if len(self._roots) > _BEGINNINGS_MAX:
            self._roots.popitem(last=False)

    def apply(self, events: Iterable[Mapping[str, Any]]) -> dict[bytes, bool]:
        """Return the changes in these events, as platform's hash -> whether its block is cached."""
        changed: dict[bytes, bool] = {}
        for event in events:
            data = event.get("data") or {}
            window = int(event.get("window_size") or 0)
            if data.get("type") == "stored":
                self._store(window, data, changed)
            elif data.get("type") == "removed":
                for their in data["block_hashes"]:
                    self._remove((window, their), changed)
        return changed

    def _store(self, window: int, data: Mapping[str, Any], changed: dict[bytes, bool]) -> None:
        parent = data.get("parent_hash")
        for block in data["blocks"]:
            their = block["block_hash"]
            tokens = [token["token_id"] for token in block["tokens"]]
            ours = self._translate(window, parent, tokens)
            if (window, their) not in self._hashes:
                self._hashes[window, their] = ours
                if ours is not None:
                    self._holders[ours] = self._holders.get(ours, 0) + 1
                    changed[ours] = True
            parent = their

    def _translate(self, window: int, parent: Any, tokens: list[int]) -> bytes | None:
        if len(tokens) != BLOCK_TOKENS:
            return None
        if parent is not None:
            before = self._hashes.get((window, parent))
            return None if before is None else block_hashes(tokens, before, 1)[0]
        hashes = [block_hashes(tokens, root, 1)[0] for root in self._roots.get(_key(tokens), ())]
        fresh = [key for key in hashes if key not in self._holders]
        return next(iter(fresh or hashes), None)

    def _remove(self, their: tuple[int, Any], changed: dict[bytes, bool]) -> None:
        ours = self._hashes.pop(their, None)
        if ours is None:
            return
        self._holders[ours] -= 1
        if not self._holders[ours]:
            del self._holders[ours]
            changed[ours] = False


def _key(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
