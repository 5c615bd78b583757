"""Translates TensorRT-LLM's KV cache events into the platform's events. Pure.

TensorRT-LLM names cached blocks by its own hashes. Its events contain the tokens of each block and
the hash of the previous block, from which this module computes the platform's chained hashes. A
chain's root also depends on adapter and tenant salt, which events of 1.2 lack. So this module
infers the root from the submitted requests. The oldest request with the tokens of the first block,
and without such a block yet, determines the root. Two such requests with different roots may
overlap. Then their roots can be swapped until the blocks are evicted. A router expects a hit at the
wrong place in this case, until `cached_tokens` of a request corrects it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sluice.hashing import BLOCK_TOKENS, block_hashes

# Largest number of first blocks whose requests' roots are stored
_BEGINNINGS_MAX = 65_536
_ROOTS_MAX = 64  # largest number of stored roots per first block


class BlockTranslator:
    """Maps TensorRT-LLM's blocks to the platform's blocks."""

    def __init__(self) -> None:
        # Tokens of a first block -> roots of the requests that began with these tokens, oldest
        # first.
        self._roots: OrderedDict[bytes, list[bytes]] = OrderedDict()
        # (window, TensorRT-LLM's hash) -> platform's hash, or None if the block is partial or its
        # root is unknown.
        self._hashes: dict[tuple[int, Any], bytes | None] = {}
        # platform's hash -> number of TensorRT-LLM's blocks with it
        self._holders: dict[bytes, int] = {}

    def expect(self, prompt: Sequence[int], root: bytes) -> None:
        """Record the root of a request with this prompt, before the request is submitted."""
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
