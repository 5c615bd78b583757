"""Block hashes of the prefix cache, computed in the same way by gateway, router and engine.

The hashes form a chain. The hash of each full block covers the block's token ids, and is keyed by
the hash of the preceding block. The first block is keyed by a root. The root covers all other
inputs of the KV values, which are base, adapter and tenant salt. So two prompts share a cached
block only if their roots and all tokens up to the end of the block are equal.
"""

import hashlib
from array import array
from collections.abc import Sequence
from struct import iter_unpack
from typing import Final

BLOCK_TOKENS: Final = 32  # tokens per KV block, fixed by the OpenVINO CPU plugin
HASH_BYTES: Final = 16
_BLOCK = f"{4 * BLOCK_TOKENS}s"  # struct format of one block, with 4 bytes per token id


def cache_root(base_digest: str, adapter_digest: str, tenant_salt: bytes) -> bytes:
    """Return the 16-byte root of a chain of block hashes.

    The parts are length-prefixed, so that different arguments never lead to the same input. Because
    of the salt, tenants share no cached blocks, and cannot detect each other's prompts by timing.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (base_digest.encode(), adapter_digest.encode(), tenant_salt):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def session_hash(tenant_id: str, session: str) -> int:
    """Return the hash of a tenant's session for sticky routing, or 0 without a session."""
    if not session:
        return 0
    key = tenant_id.encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        key = hashlib.blake2b(key).digest()
    digest = hashlib.blake2b(session.encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def block_hashes(
    tokens: Sequence[int], root: bytes, count: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hashes of the first `count` full blocks of `tokens`.

    Args:
        tokens: Token ids, at least `count * BLOCK_TOKENS`.
        root: Root of the chain, from `cache_root`.
        count: Number of full blocks to hash.
        known: Hashes of the first blocks that were already computed, at most `count`.
    """
    assert len(tokens) >= count * BLOCK_TOKENS, (len(tokens), count)
    hashes = list(known)
    ids = tokens[len(hashes) * BLOCK_TOKENS : count * BLOCK_TOKENS]
    _extend(hashes, ids, hashes[-1] if hashes else root)
    return hashes


def chained_hashes(tokens: Sequence[int], root: bytes, known: bytes = b"") -> bytes:
    """Return the hashes of all full blocks of `tokens`, concatenated.

    Args:
        tokens: Token ids.
        root: Root of the chain, from `cache_root`.
        known: Earlier result for a prefix of `tokens`, so that only the rest is hashed.
    """
    first = len(known) // HASH_BYTES * BLOCK_TOKENS
    hashes = [known] if known else []
    ids = tokens[first : len(tokens) - len(tokens) % BLOCK_TOKENS]
    _extend(hashes, ids, known[-HASH_BYTES:] or root)
    return b"".join(hashes)


def shared_blocks(one: bytes, other: bytes) -> int:
    """Return how many leading blocks two prompts have in common, by their concatenated hashes."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:  # binary search, since in a chain equal hashes imply equal preceding hashes
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        low, high = (middle, high) if one[last] == other[last] else (low, middle - 1)
    return low


def _extend(hashes: list[bytes], ids: Sequence[int], key: bytes) -> None:
    """Append the hash of each block of `ids`, which follow the block whose hash is `key`.

    The ids are packed into an array once, because slicing a list per block would cost as much as
    hashing. Unsigned 32-bit integers are the format that arrays fill fastest, and fit all token
    ids.
    """
    blake2b = hashlib.blake2b
    packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    for (block,) in iter_unpack(_BLOCK, packed):
        key = blake2b(block, key=key, digest_size=HASH_BYTES).digest()
        hashes.append(key)
